"""Exact per-sample clipping of any model's gradient, without per-sample gradients."""
