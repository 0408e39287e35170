"""The noise of a step, and the optimizer that adds it."""
