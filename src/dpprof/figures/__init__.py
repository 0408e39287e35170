"""Pictures of tables: each module draws one figure and says what question it answers."""
