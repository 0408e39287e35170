"""Checks a user's own private training against the gradients of single samples."""
