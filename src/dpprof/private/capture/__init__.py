"""Whole steps as CUDA graphs."""
