"""Which method to use on a GPU, and which batch fits there."""
