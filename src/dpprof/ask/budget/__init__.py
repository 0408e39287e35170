"""What a privacy budget costs with each method."""
