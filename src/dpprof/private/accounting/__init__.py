"""The noise that keeps a privacy budget, and what was spent of it."""
