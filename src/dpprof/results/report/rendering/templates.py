"""How templates are read, and text that stays text in Markdown and on its line."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jinja2

from dpprof.system.console import printable
from dpprof.system.paths import TEMPLATES


@functools.cache
def make_environment(escape: Callable[[Any], Any], **options: Any) -> jinja2.Environment:
    """Return an environment that escapes every value and fails on an unknown name.

    Args:
        escape: Returns a value as text that the format does not read as markup.
        options: Further options of ``jinja2.Environment``.
    """
    return jinja2.Environment(  # noqa: S701 (finalize escapes)
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=escape,
        **options,
    )


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
