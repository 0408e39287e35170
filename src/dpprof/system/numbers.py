"""Numbers as text."""

import math


def three_digits(value: float) -> str:
    """Return a number with three significant digits.

    Example:
        >>> three_digits(1234.5), three_digits(0.01234), three_digits(0)
        ('1,234', '0.0123', '0')
    """
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"
