"""Records: JSON files with a digest of their content, their schemas and their provenance."""
