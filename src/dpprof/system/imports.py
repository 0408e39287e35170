"""Imports without garbage collections.

Collections take a quarter of the time of PyTorch's and Opacus's imports: each of a few hundred
thousand new objects is looked at again and again, and hardly any is garbage.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
