"""Every table: its columns, its rows, its CSV file."""
