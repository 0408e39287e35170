"""The questions: as functions, and as commands."""
