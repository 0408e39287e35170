"""What a config asks for: experiments, sweeps, targets, and the names that exist."""
