"""Norms of one layer's per-sample gradients, as pure functions of tensors."""
