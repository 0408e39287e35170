"""Which method to use, and what a privacy budget costs with it."""
