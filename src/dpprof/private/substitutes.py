"""Replaces attributes of objects for a while, where there is no hook."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def substitute(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute, which exists, inside the context, and restore it afterwards."""
    getattr(owner, name)
    own = vars(owner)
    is_own, before = name in own, own.get(name)  # as stored, without binding a descriptor
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
