"""The first page: the question, the answer, and how far to trust it."""
