"""Whole users as the unit of privacy: whose samples are whose, and which of them are drawn.

Shape legend: B samples, U users, N samples of the data.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpprof.private.errors import is_count

UNITS = ("sample", "user")  # of whom one is added or removed, at most
GRADIENTS = ("mean", "sum")  # what a user's gradient is of those of his samples in a batch


class Segments(NamedTuple):
    """How many samples users have in a batch, one user's after another's.

    Example:
        >>> import torch
        >>> from dpprof.private.samples.users import Segments
        >>> Segments((2, 1)).join(torch.tensor([1.0, 3.0, 5.0]))
        tensor([2., 5.])
    """

    sizes: tuple[int, ...]
    averages: bool = True
    """Whether a user's gradient is the mean of those of his samples, and not their sum."""

    def share_of(self, samples: Tensor) -> Tensor | float:
        """Return what multiplies each sample's gradient in its user's; (B,), or a number."""
        if not self.averages:
            return 1.0
        shares = [1 / size for size in self.sizes for _ in range(size)]
        return samples.new_tensor(shares)

    def join(self, samples: Tensor) -> Tensor:
        """Join what samples have to what users have of them; (B, ...) to (U, ...)."""
        parts = torch.split(samples, list(self.sizes))
        return torch.stack([part.mean(0) if self.averages else part.sum(0) for part in parts])


def verify_segments(users: Any, samples: int, *, least: int = 1) -> None:
    """Refuse what are no segments of samples, of ``least`` users, or none (``ValueError``)."""
    is_right = isinstance(users, Segments) and isinstance(users.sizes, tuple)
    is_right = is_right and len(users.sizes) >= min(least, samples)
    is_right = is_right and all(map(is_count, users.sizes))
    if not is_right or sum(users.sizes) != samples:
        raise ValueError(
            f"users must be Segments of how many samples each of at least {least} users has in the "
            f"batch, a tuple of whole numbers of at least 1 that add up to {samples}, and are "
            f"{users}"
        )


class Users:
    """Whose the samples are, by the ``ids`` of users, and the most of each in a batch."""

    def __init__(self, ids: NDArray[np.integer[Any]], most: int, *, averages: bool) -> None:
        order = np.argsort(ids, kind="stable")
        starts = np.flatnonzero(np.diff(ids[order])) + 1
        self.most, self.averages = most, averages
        self._own: list[list[int]] = [own.tolist() for own in np.split(order, starts)]
        self.digest = hashlib.sha256(order.tobytes() + starts.tobytes()).hexdigest()
        """Of whose each sample is."""

    def __len__(self) -> int:
        """How many users there are."""
        return len(self._own)

    def draw(self, user: int, generator: torch.Generator) -> list[int]:
        """Draw a user's samples in a batch: all, or a uniformly random subset of ``most``."""
        own = self._own[user]
        if len(own) <= self.most:
            return own
        chosen = torch.randperm(len(own), generator=generator)[: self.most]
        return [own[at] for at in chosen.tolist()]

    def cut(self, samples: int) -> Segments:
        """Cut any samples, at least two, into those of several users, to check with."""
        sizes: list[int] = []
        while left := samples - sum(sizes):
            sizes.append(2 if self.most > 1 and left > 2 and not len(sizes) % 2 else 1)  # noqa: PLR2004
        return Segments(tuple(sizes), self.averages)

    def segment(self, batch: Sequence[Sequence[int]]) -> Segments:
        """Return the segments of a batch that has some samples of each of its users."""
        return Segments(tuple(map(len, batch)), self.averages)


def read_users(
    unit: str, users: Any, samples_of_user: Any, user_gradient: str, dataset: Any
) -> Users | None:
    """Read who is protected; None for each sample by itself.

    ``users`` are (N,) the id of each sample's user, a whole number, for a dataset of N samples;
    ``find_public_numbers`` refuses one without length. ``ValueError``: settings are none of
    ``UNITS`` and ``GRADIENTS``, or contradict each other.
    """
    named = {"unit": (unit, UNITS), "user_gradient": (user_gradient, GRADIENTS)}
    for name, (value, allowed) in named.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, and is {value!r}")
    if unit == "sample":
        if users is not None or samples_of_user is not None:
            raise ValueError("users and samples_of_user are of unit='user', and unit is 'sample'")
        return None
    if not is_count(samples_of_user):
        raise ValueError(
            "unit='user' needs samples_of_user, the most samples of a user in a step, a whole "
            f"number of at least 1, and it is {samples_of_user!r}"
        )
    if users is None:
        raise ValueError("unit='user' needs users, the id of each sample's user, and it is None")
    ids = _read_ids(users)
    if ids is None or ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise ValueError(
            "users must be whole numbers, the id of each sample's user, and are "
            f"{type(users).__name__}{'' if ids is None else f' of {ids.dtype}, {ids.shape}'}; "
            "number other ids, for example by pandas.factorize"
        )
    if hasattr(dataset, "__len__") and len(ids) != len(dataset):
        raise ValueError(
            f"users must have an id for each of {len(dataset):,} samples, and has {len(ids):,}"
        )
    return Users(ids, int(samples_of_user), averages=user_gradient == "mean")


def _read_ids(users: Any) -> NDArray[Any] | None:
    """Return ids as an array; None of what is no list of numbers."""
    try:
        return np.asarray(users.cpu() if isinstance(users, Tensor) else users)
    except (TypeError, ValueError, OverflowError):
        return None
