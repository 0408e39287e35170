"""Imports at first use: what a package names is loaded when somebody asks for it."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def import_at_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package, so that it alone does not load what it names.

    Args:
        package: The package's name, for the message about an unknown one.
        modules: The module of each public name.
    """

    def find(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
