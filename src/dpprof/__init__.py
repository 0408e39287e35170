"""Where the memory, time, FLOPs and bytes of differentially private training go."""

__version__ = "0.1.0"
