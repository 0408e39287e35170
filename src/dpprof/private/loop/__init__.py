"""Whole training loops: in one call, and as a trainer of Hugging Face's."""
