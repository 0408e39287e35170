"""Names of mechanisms: what makes a method private, as methods declare it and verdicts check it."""

FLAT = "flat clipping"
"""Clips all parameters together to one bound; the mechanism of methods that declare none."""

NO_CLIPPING = "none"  # the mechanism of a method that is not private


def is_other_mechanism(mechanism: object) -> bool:
    """Return whether a mechanism is private but not flat clipping."""
    return isinstance(mechanism, str) and mechanism not in (FLAT, NO_CLIPPING)
