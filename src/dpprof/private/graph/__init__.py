"""What autograd's graph proves: which sample each element belongs to."""
