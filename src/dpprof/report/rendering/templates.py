"""How templates are read."""

import functools
from collections.abc import Callable
from typing import Any

import jinja2

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
