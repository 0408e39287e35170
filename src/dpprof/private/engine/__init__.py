"""Clips each sample's gradient: in one backward pass, in two, and layer by layer."""
