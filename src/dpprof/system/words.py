"""Words as a sentence needs them."""

from collections.abc import Iterable


def listed(names: Iterable[object]) -> str:
    """Return names as words: a, b and c."""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last


def plural(count: int, noun: str, many: str | None = None) -> str:
    """Return the form of a word that goes with a count."""
    return noun if count == 1 else many or f"{noun}s"
