"""Text in Markdown that stays text."""

import re
from typing import Any


def escape_markdown(value: Any) -> str:
    """Return a text escaped for Markdown: no markup, no HTML, no mathematics."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|#$~!])", r"\\\1", text)
