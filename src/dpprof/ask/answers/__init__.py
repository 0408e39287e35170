"""The answers of dpprof as functions: the commands print them, and Python has them as objects."""
