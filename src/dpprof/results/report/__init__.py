"""The report: its content as data, and its layout by templates."""
