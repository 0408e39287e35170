"""What one experiment would take, predicted without running it."""
