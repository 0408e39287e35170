"""What a config specifies: experiments, sweeps, targets, and the names that exist."""
