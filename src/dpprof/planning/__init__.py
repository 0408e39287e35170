"""From a config to what must run, and on which code."""
