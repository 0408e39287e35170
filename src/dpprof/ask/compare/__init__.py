"""What got worse from one folder of results to another."""
