"""Why one run needs more memory than another."""
