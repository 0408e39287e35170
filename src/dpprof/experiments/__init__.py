"""What an experiment is, what has to run, and how it runs in a process of its own."""
