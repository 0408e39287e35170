"""Attributes of other packages' objects, replaced for a while where they have no other hook."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def substitute(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute within; afterwards it is what it was, or is inherited again.

    Args:
        owner: A module, a class or an object.
        name: The attribute.
        value: What it is within.

    Raises:
        AttributeError: There is no such attribute, so that nobody would ask for it.
    """
    getattr(owner, name)
    own = vars(owner)
    is_own, before = name in own, own.get(name)  # as it is stored: a descriptor is not bound
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
