"""Keeps the states of random generators, so that a check leaves training's draws as they are."""

import gc
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Read = tuple[list[bytes], dict[torch.Generator, Tensor], list[bytes]]


class OtherGenerators:
    """The generators of NumPy and Python that this process has."""

    def __init__(self) -> None:
        kinds = [np.random.BitGenerator, random.Random]
        for kind in kinds:  # which grows: one look-up for each of a million objects is fast
            kinds += kind.__subclasses__()
        seeded = {kind for kind in kinds if not issubclass(kind, random.SystemRandom)}
        self._all = [value for value in gc.get_objects() if type(value) in seeded]

    def read(self) -> list[bytes]:
        """Return their states."""
        return [
            pickle.dumps(own.getstate() if isinstance(own, random.Random) else own.state)
            for own in self._all
        ]

    def write(self, states: list[bytes]) -> None:
        """Set their states to those that ``read`` returned."""
        for generator, state in zip(self._all, states, strict=True):
            value = pickle.loads(state)  # noqa: S301 (it was written here)
            if isinstance(generator, random.Random):
                generator.setstate(value)
            else:
                generator.state = value


def seed_secretly(generator: torch.Generator) -> None:
    """Let all that draws by itself, as dropout and augmentation do, follow from a secret."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the generator that others seed, too)


@contextmanager
def random_state_kept() -> Iterator[OtherGenerators]:
    """Restore PyTorch's own generators, and all of NumPy's and Python's, which it yields."""
    others = OtherGenerators()
    states = others.read()
    with torch.random.fork_rng():
        try:
            yield others
        finally:
            others.write(states)


class _Noted:
    drew = False


class States:
    """The states of all generators, and of those that only the loss and ``collate_fn`` have."""

    def __init__(self, others: OtherGenerators) -> None:
        self._others = others
        self._seen: dict[torch.Generator, Tensor] = {}

    def read(self) -> Read:
        """Return the states."""
        own = [torch.get_rng_state()]
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        own += torch.cuda.get_rng_state_all() if has_cuda else []
        seen = {generator: generator.get_state() for generator in self._seen}
        return [state.numpy().tobytes() for state in own], seen, self._others.read()

    def write(self, states: Read) -> None:
        """Set the states back; a generator seen only later returns to its state before it drew."""
        own, seen, others = states
        cpu, *of_cuda = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in own)
        torch.set_rng_state(cpu)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)
        for generator, first in self._seen.items():
            generator.set_state(seen.get(generator, first))
        self._others.write(others)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the generators that were seen back to their first states, at the end."""
        try:
            yield
        finally:
            for generator, first in self._seen.items():
                generator.set_state(first)

    @contextmanager
    def noting(self) -> Iterator[_Noted]:
        """Note whether anything draws inside the context."""
        noted, others = _Noted(), self._others.read()
        with _Noting(self, noted):
            yield noted
        noted.drew |= others != self._others.read()

    def note(self, generator: torch.Generator | None) -> list[bytes]:
        """Return the states from which an operator may draw, and remember its own generator."""
        if generator is None:
            return self.read()[0]
        state = generator.get_state()
        self._seen.setdefault(generator, state)
        return [state.numpy().tobytes()]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operators that draw, also where the loss sets a seed before."""

    def __init__(self, states: States) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = states

    def see(self, func: Any, args: Any, out: Any) -> None:
        """Take what an operator that drew got and returned."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = self._states.note(kwargs.get("generator"))
        out = func(*args, **kwargs)
        if before != self._states.note(kwargs.get("generator")):
            self.see(func, args, out)
        return out


class _Noting(Watch):  # type: ignore[no-untyped-call]
    """Notes that an operator drew."""

    def __init__(self, states: States, noted: _Noted) -> None:
        super().__init__(states)
        self._noted = noted

    def see(self, *_: Any) -> None:
        self._noted.drew = True


def get_state(device: torch.device) -> Tensor:
    """Return the state of PyTorch's generator of a device."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_state(device: torch.device, state: Tensor) -> None:
    """Set the state of PyTorch's generator of a device."""
    if device.type == "cpu":
        torch.set_rng_state(state.cpu())
    else:
        torch.cuda.set_rng_state(state.cpu(), device)
