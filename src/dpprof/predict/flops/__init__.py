"""What operators cost: FLOPs, bytes and kinds."""
