"""Figures drawn from tables: each module's docstring states the question it answers."""
