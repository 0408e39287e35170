"""Plans a config: which runs it needs, and which code they depend on."""
