"""Refuses by name what cannot be bounded."""
