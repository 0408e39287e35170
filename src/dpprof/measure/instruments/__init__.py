"""What watches a process; exactly one per process."""
