"""Repeats the random numbers of a user's loss: for the whole batch, in parts, or for one sample.

The operators of PyTorch that draw are run as they are, and their numbers are replaced by those that
the loss drew for the batch: the rows of the samples that are computed, where an axis has rows of
samples. What is drawn again in backward, by checkpointing, is known by the generator's state.

Shape legend: B samples.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_RTOL = 1e-2
"""How much what decides on a sample's numbers may differ by rounding."""


class _Draw(NamedTuple):
    """One operator that drew."""

    func: Any
    scalars: tuple[Any, ...]
    depends_on: tuple[Tensor, ...]
    """The tensors that decide on the numbers, such as probabilities."""

    numbers: Tensor | None
    """None if they cannot be told from what else the operator computes."""


class Draws:
    """What a loss drew for a batch of B samples, in order."""

    def __init__(self, samples: int = 0) -> None:
        self.samples = samples
        self.made: list[_Draw] = []
        self.elsewhere: list[bytes] | None = None
        """The states of NumPy's and Python's generators before, if the loss draws with them."""

    def of_turn(self, sample: int, each: int) -> "Draws":
        """Return a sample's own draws, where the loss draws ``each`` for one after the other."""
        own = Draws(self.samples)
        own.made, own.elsewhere = self.made[sample * each : (sample + 1) * each], self.elsewhere
        return own

    def call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Run an operator, and keep its numbers."""
        state = _state_of(func, args, kwargs)
        out = func(*args, **kwargs)
        if state != _state_of(func, args, kwargs):
            self.made.append(_describe(func, args, out))
        return out, True


class Replay:
    """Replaces numbers by those of ``Draws``.

    Args:
        made: What was drawn for the whole batch.
        sample: The one that is computed alone, or that is looked at; None for a step.
        is_alone: Whether nothing but this sample is computed.
        split: The samples of a step that may compute its batch in parts, in order; None for
            one that computes the loss once.
    """

    def __init__(
        self,
        made: Draws,
        sample: int | None = None,
        *,
        is_alone: bool = False,
        split: int | None = None,
    ) -> None:
        self._all, self._samples, self._sample = made.made, made.samples, sample
        self._is_alone, self._split = is_alone, split
        self._first = sample if is_alone and sample is not None else 0
        self._count = 1 if is_alone else None
        self._at = 0
        self._given: dict[Any, Tensor] = {}
        self._missed: str | None = None
        self.mixes: str | None = None
        """An operator whose numbers of the sample depend on others."""

    @property
    def asked(self) -> int:
        """How many of the batch's draws were repeated."""
        return self._at

    @property
    def missed(self) -> str | None:
        """The first operator whose numbers may have been other ones than the batch's."""
        left = self._all[self._at :] if self._sample is not None else []
        return self._missed or next((str(one.func) for one in left), None)

    def call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Run an operator; tell whether it drew the numbers of the batch."""
        state = _state_of(func, args, kwargs) if self._all else None
        out = func(*args, **kwargs)
        if state is None or state == _state_of(func, args, kwargs):  # attention without dropout
            return out, False
        one = _describe(func, args, out)
        if one.numbers is None:
            self._missed = self._missed or str(func)
            return out, False
        is_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 (there is no other way)
        # In backward checkpointing draws again, from the state that it kept.
        rows = self._given.get(state) if is_backward else self._find(one)
        if rows is None or rows.shape != one.numbers.shape:
            return out, False
        self._given[state] = rows
        _replace(func, args, out, rows)
        return out, True

    def _find(self, one: _Draw) -> Tensor | None:
        """Return the numbers of the next operator of the batch; None if they are not known."""
        if self._at == len(self._all):
            if self._sample is not None:
                self._missed = self._missed or str(one.func)
            if self._split is None:
                return None
            self._first, self._count, self._at = self._first + (self._count or 1), None, 0
        if self._split is not None and self._first >= self._split:
            return None  # as the noise of a step
        then = self._all[self._at]
        is_begun = self._at or not self._first or self._is_alone
        rows = None
        if then.func is one.func and then.scalars == one.scalars and then.numbers is not None:
            assert one.numbers is not None
            rows = self._rows(then.numbers, one.numbers.shape)
        if rows is None:
            if is_begun:
                self._missed = self._missed or str(one.func)
                self._at += then.func is one.func
            return None
        self._compare(then, one)
        self._at += 1
        return rows

    def _rows(self, numbers: Tensor, shape: torch.Size) -> Tensor | None:
        """Return the rows of the samples that are computed."""
        B = self._samples
        if numbers.shape == shape:
            if self._count is None and any(size and size % B == 0 for size in shape):
                self._count = B
            if self._is_alone and B in shape:
                self._missed = self._missed or "an operator that draws for all samples"
            return numbers
        if len(shape) != numbers.dim():
            return None
        others = [at for at, size in enumerate(shape) if size != numbers.shape[at]]
        axis = others[0]
        each, rest = divmod(numbers.shape[axis], B)
        if len(others) > 1 or rest or not each or shape[axis] % each:
            return None
        count = shape[axis] // each
        if self._count not in (None, count) or self._first + count > B:
            return None
        if each > 1:  # samples may come first in them, or last
            self._missed = self._missed or "an operator that draws several rows for each sample"
        self._count = count
        return numbers.narrow(axis, self._first * each, count * each)

    def _compare(self, then: _Draw, one: _Draw) -> None:
        """Note numbers of the sample that are drawn from something else in other company."""
        at, B = self._sample, self._samples
        if at is None:
            return
        for before, now in zip(then.depends_on, one.depends_on, strict=False):
            if not before.dim() or len(before) != B or len(now) not in (1, B):
                continue
            rows = before[at], now[at if len(now) == B else 0]
            if rows[0].shape == rows[1].shape and not _is_close(*rows):
                self.mixes = str(one.func)


def _describe(func: Any, args: Any, out: Any) -> _Draw:
    name = func.overloadpacket.__name__
    scalars = tuple(one for one in args if isinstance(one, bool | int | float))
    tensors = tuple(one for one in args if isinstance(one, Tensor))
    is_filled = name.endswith(("_", "_like"))
    if name == "native_dropout":
        return _Draw(func, scalars, (), out[1].clone())
    if not isinstance(out, Tensor) or name.startswith("rrelu"):
        return _Draw(func, scalars, (), None)
    depends_on = tuple(one.detach().clone() for one in tensors[1 if is_filled else 0 :])
    return _Draw(func, scalars, depends_on, out.detach().clone())


def _replace(func: Any, args: Any, out: Any, rows: Tensor) -> None:
    if func.overloadpacket.__name__ != "native_dropout":
        out.copy_(rows)
        return
    dropped, mask = out
    mask.copy_(rows)
    kept = 1 - args[1]
    dropped.copy_(args[0] * mask / kept if kept else torch.zeros_like(dropped))


def _state_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the state of the generator from which an operator may draw; None if it does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator")
    if generator is None:
        tensors = [one for one in args if isinstance(one, Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        if device.type == "cuda":
            at = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[at]
        else:
            generator = torch.default_generator
    return id(generator), generator.get_state().numpy().tobytes()


def _is_close(before: Tensor, now: Tensor) -> bool:
    first, second = before.double(), now.double()
    return torch.allclose(first, second, rtol=_RTOL, atol=_RTOL * float(first.abs().max()))
