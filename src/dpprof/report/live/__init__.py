"""The report in a browser while a sweep runs."""
