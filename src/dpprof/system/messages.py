"""Cuts and escapes messages of other programs, so that they can be stored."""

from collections.abc import Mapping, Sequence
from typing import Any

LIMIT = 2_000
"""The number of characters kept of a message, from its beginning."""

KIND_LIMIT = 200
"""The number of characters kept of an exception's type."""


def shorten(text: str, limit: int = LIMIT) -> str:
    """Return the beginning of a message, with its full length if it is cut."""
    if len(text) <= limit:
        return escape(text)
    return f"{escape(text[:limit])} ... ({len(text):,} characters)"


def escape(text: str) -> str:
    r"""Return a text with lone surrogates, which have no encoding, spelled as ``\ud800``."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def escape_all(value: Any) -> Any:
    """Return a value of mappings and lists with every text escaped, including keys."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {escape_all(key): escape_all(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [escape_all(part) for part in value]
    return value
