"""From result files to tables."""
