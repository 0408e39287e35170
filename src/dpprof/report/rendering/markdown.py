"""Text in Markdown that stays text, and text that stays on its line."""

import re
from typing import Any

from dpprof.system.console import printable


def escape_markdown(value: Any) -> str:
    """Return a text escaped for Markdown: no markup, no HTML, no mathematics."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|#$~!])", r"\\\1", text)


def on_one_line(text: str) -> str:
    """Return a text on one line, in which nothing can disturb a terminal."""
    return printable(text.replace("\n", "\\n"))


def escape_line(text: str) -> str:
    """Return a text on one line, escaped for Markdown."""
    return escape_markdown(on_one_line(text))
