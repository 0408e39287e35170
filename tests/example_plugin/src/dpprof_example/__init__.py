"""A method and a model for dpprof, to copy from."""
