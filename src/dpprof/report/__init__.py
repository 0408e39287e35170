"""The report: content as data, laid out by templates."""
