"""Methods: ways to compute the clipped, noised gradient of a batch, one file each."""
