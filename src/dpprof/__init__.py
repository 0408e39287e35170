"""Where the memory, time, FLOPs and bytes of differentially private training go."""
