"""Runs each measurement in its own process, with locks, limits and retries, and records it."""
