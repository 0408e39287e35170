"""What the library raises where nothing in the standard library says it."""


class UnsupportedError(Exception):
    """A combination of valid values that cannot run, here or anywhere; the message says why."""
