"""The sections of the report, and the tables in its appendix."""
