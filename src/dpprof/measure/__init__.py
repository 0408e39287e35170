"""What watches real runs: devices, instruments, traces, monitor, verification of methods."""
