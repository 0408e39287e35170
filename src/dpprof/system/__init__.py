"""The machine below: files, the terminal, processes, hardware."""
