"""Imports at first use, and imports without garbage collections.

Collections take a quarter of the time of PyTorch's and Opacus's imports: each of a few hundred
thousand new objects is looked at again and again, and hardly any is garbage.
"""

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Collect no garbage inside the context, and leave out what exists at its end ever after.

    It is for the beginning of a process that imports libraries and then works: what is garbage at
    the end of the context is never freed. Afterwards garbage is collected as it was before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
