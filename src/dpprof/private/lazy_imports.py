"""Imports at first use: what a package names is loaded when somebody asks for it."""

import gc
import importlib
from collections.abc import Callable, Mapping
from typing import Any


def import_at_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package, so that it alone does not load what it names.

    No garbage is collected while something is loaded: collections take a quarter of the time of
    PyTorch's import, and hardly any of its objects is garbage.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return getattr(importlib.import_module(modules[name]), name)
        finally:
            if was_enabled:
                gc.enable()

    return find
