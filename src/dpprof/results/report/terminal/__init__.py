"""Differences and comparisons for a terminal, and as Markdown."""
