"""The content of a report, and how it is laid out as Markdown, LaTeX and PDF."""
