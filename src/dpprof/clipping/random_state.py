"""Keeps the states of random generators, so that a check leaves training's draws as they are."""

import gc
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class OtherGenerators:
    """The generators of NumPy and Python that this process has."""

    def __init__(self) -> None:
        kinds = (np.random.BitGenerator, random.Random)
        self._all = [
            one
            for one in gc.get_objects()
            if issubclass(type(one), kinds) and not issubclass(type(one), random.SystemRandom)
        ]

    def read(self) -> list[bytes]:
        """Return their states."""
        return [
            pickle.dumps(one.getstate() if isinstance(one, random.Random) else one.state)
            for one in self._all
        ]

    def write(self, states: list[bytes]) -> None:
        """Set their states to those that ``read`` returned."""
        for one, state in zip(self._all, states, strict=True):
            value = pickle.loads(state)  # noqa: S301 (it was written here)
            if isinstance(one, random.Random):
                one.setstate(value)
            else:
                one.state = value


@contextmanager
def random_state_kept() -> Iterator[OtherGenerators]:
    """Restore the states of PyTorch's own generators, and all of NumPy's and Python's, at the end.

    Yields the latter.
    """
    others = OtherGenerators()
    states = others.read()
    with torch.random.fork_rng():
        try:
            yield others
        finally:
            others.write(states)
