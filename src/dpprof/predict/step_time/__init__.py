"""Predicts how long a training step takes on a device, operator by operator."""
