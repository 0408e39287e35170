"""What differs between devices: allocator counters, clocks, limits."""
