"""Why one peak is higher than another: the numbers of ``dpprof explain``."""
