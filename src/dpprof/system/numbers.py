"""Numbers as text."""

import math


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
