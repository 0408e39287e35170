"""The report as one HTML file that people can play with."""
