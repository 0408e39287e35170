"""Which models can be trained privately on a GPU."""
