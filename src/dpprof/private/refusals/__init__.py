"""What cannot be bounded, and is refused by name."""
