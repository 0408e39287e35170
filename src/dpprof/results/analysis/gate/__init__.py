"""What got worse from one folder of results to another: the gate of ``dpprof compare``."""
