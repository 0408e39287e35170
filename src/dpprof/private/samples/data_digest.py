"""Describes data by their number and some samples, so that ranks can tell whether theirs are alike.

Of several ranks each draws from samples of its own, by their places: another order would give one
sample to two ranks, and it would count twice.
"""

import hashlib
import random
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpprof.private.samples.random_state import random_state_kept

if TYPE_CHECKING:
    from collections.abc import Sized

_LOOKED_AT = 16  # samples, evenly spread


def digest_data(dataset: Any) -> str:
    """Return a digest of a dataset; of its number of samples alone if they are read at random."""
    count = len(cast("Sized", dataset))
    places = range(0, count, max(1, count // _LOOKED_AT))
    with random_state_kept():
        first, again = (_read(dataset, places) for _ in range(2))
    return f"{count} {first if first == again else ''}"


def _read(dataset: Any, places: range) -> str:
    """Read samples with the same draws of augmentation on every rank."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the one that others draw from)
    digest = hashlib.sha256()
    for place in places:
        for leaf in pytree.tree_leaves(dataset[place]):
            digest.update(_bytes_of(leaf))
    return digest.hexdigest()


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, str | bytes | int | float | None):
        return repr(leaf).encode()
    in_bytes = getattr(leaf, "tobytes", None)  # of arrays and pictures
    return in_bytes() if callable(in_bytes) else type(leaf).__name__.encode()
