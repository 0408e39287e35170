"""What a step will cost: FLOPs, memory, time, and how large a batch fits."""
