"""From result files to tables, figures and the report."""
