"""The operating system: files, the terminal, processes, hardware."""
