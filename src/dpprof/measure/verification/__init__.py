"""Proof that a method's clipped gradient is the reference's."""
