"""Proof that a method's clipped gradient is the reference's, on a reduced model."""
