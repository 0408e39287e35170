"""What others said, made fit to keep: of bounded length, and text that can be encoded."""

from collections.abc import Mapping, Sequence
from typing import Any

LIMIT = 2_000
"""Characters of a message that are kept: of what a failure says, the beginning tells it."""

KIND_LIMIT = 200
"""Characters of an exception's type that are kept; nobody means a longer name."""


def shorten(text: str, limit: int = LIMIT) -> str:
    """Keep the beginning of a message, and say where that is not all of it."""
    if len(text) <= limit:
        return escape(text)
    return f"{escape(text[:limit])} ... ({len(text):,} characters)"


def escape(text: str) -> str:
    r"""Spell what has no encoding, a lone surrogate, as Python does: ``\ud800``."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def escape_all(value: Any) -> Any:
    """Escape every text, keys included, of a value made of mappings and lists."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {escape_all(key): escape_all(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [escape_all(part) for part in value]
    return value
