"""Words and numbers as a sentence needs them."""

import math
from collections.abc import Iterable


def listed(names: Iterable[object]) -> str:
    """Return names as words: a, b and c."""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last


def plural(count: int, noun: str, many: str | None = None) -> str:
    """Return the form of a word that goes with a count."""
    return noun if count == 1 else many or f"{noun}s"


def three_digits(value: float | None, unit: float = 1.0) -> str:
    """Return a number in a unit with three significant digits; a dash where it is unknown.

    Example:
        >>> three_digits(1234.5), three_digits(12.34, 1000), three_digits(0), three_digits(None)
        ('1,234', '0.0123', '0', '-')
    """
    if value is None:
        return "-"
    value /= unit
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"
