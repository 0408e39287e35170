"""What makes a method private, by name: what methods declare and verdicts hold them to."""

FLAT = "flat clipping"
"""All parameters as one, to one bound: what a method does unless it declares another."""

NO_CLIPPING = "none"
"""The mechanism of a method that is not private."""


def is_other_mechanism(mechanism: object) -> bool:
    """Tell whether a method is private in another way than by flat clipping."""
    return isinstance(mechanism, str) and mechanism not in (FLAT, NO_CLIPPING)
