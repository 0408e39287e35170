"""One process for each measurement: locks, limits, attempts, and one record always."""
