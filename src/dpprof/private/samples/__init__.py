"""Batches split by samples, and samples compared alone and in company."""
