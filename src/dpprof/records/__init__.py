"""What is written down: self-checking JSON files, their schemas and their provenance."""
