"""Reads traces of torch.profiler: the time of each operator, and the time in which nothing runs."""
