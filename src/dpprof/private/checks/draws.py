"""Repeats the random numbers of a user's loss, for the whole batch or a sample; silences noise.

The operators of PyTorch that draw run as they are, and their numbers are replaced by those that the
loss drew for the batch: where an axis has rows of samples, by the rows of the samples that are
computed. Draws that checkpointing repeats in backward are recognised by the generator's state.

Shape legend: B samples.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.private.samples.drawn_numbers import Draw, describe, replace

_RTOL = 1e-2  # how much rounding may change the tensors that decide on a sample's numbers


class Draws:
    """What a loss drew for a batch of B samples, in order."""

    def __init__(self, samples: int = 0) -> None:
        self.samples = samples
        self.made: list[Draw] = []
        self.elsewhere: list[bytes] | None = None  # states of NumPy and Python, if drawn from

    def of_turn(self, sample: int, each: int) -> "Draws":
        """Return a sample's own draws, where the loss draws ``each`` for sample after sample."""
        own = Draws(self.samples)
        own.made, own.elsewhere = self.made[sample * each : (sample + 1) * each], self.elsewhere
        return own

    def call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Run an operator, and keep its numbers; they are always those of the loss."""
        state = _state_of(func, args, kwargs)
        out = func(*args, **kwargs)
        if state != _state_of(func, args, kwargs):
            self.made.append(describe(func, args, out))
        return out, True


class Replay:
    """Replaces numbers by those of ``Draws``, ``made`` for the whole batch.

    ``sample`` is computed alone, or looked at in company; None for a step. ``split`` is how
    many samples a step has that may compute its batch in parts, in order; None for a loss that
    is computed once.
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
        self._next = 0
        self._rows_of_states: dict[Any, Tensor] = {}
        self._missed: str | None = None
        self.mixes: str | None = None  # an operator whose numbers depend on other samples

    @property
    def asked(self) -> int:
        """How many of the batch's draws were repeated."""
        return self._next

    @property
    def missed(self) -> str | None:
        """The first operator whose numbers may not have been the batch's."""
        left = self._all[self._next :] if self._sample is not None else []
        return self._missed or next((str(draw.func) for draw in left), None)

    def call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Run an operator; tell whether it drew the numbers of the batch."""
        state = _state_of(func, args, kwargs) if self._all else None
        out = func(*args, **kwargs)
        if state is None or state == _state_of(func, args, kwargs):  # attention without dropout
            return out, False
        draw = describe(func, args, out)
        if draw.numbers is None:
            self._missed = self._missed or str(func)
            return out, False
        is_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 (there is no other way)
        # In backward checkpointing draws again, from the state that it kept.
        rows = self._rows_of_states.get(state) if is_backward else self._find(draw)
        if rows is None or rows.shape != draw.numbers.shape:
            return out, False
        self._rows_of_states[state] = rows
        replace(func, args, out, rows)
        return out, True

    def _find(self, draw: Draw) -> Tensor | None:
        """Return the numbers of the next operator of the batch; None if they are not known."""
        if self._next == len(self._all):
            if self._sample is not None:
                self._missed = self._missed or str(draw.func)
            if self._split is None:
                return None
            self._first, self._count, self._next = self._first + (self._count or 1), None, 0
        if self._split is not None and self._first >= self._split:
            return None  # as the noise of a step
        recorded = self._all[self._next]
        is_begun = self._next or not self._first or self._is_alone
        rows = None
        is_alike = (recorded.func, recorded.scalars) == (draw.func, draw.scalars)
        if is_alike and recorded.numbers is not None:
            assert draw.numbers is not None
            rows = self._rows(recorded.numbers, draw.numbers.shape)
        if rows is None:
            if is_begun:
                self._missed = self._missed or str(draw.func)
                self._next += recorded.func is draw.func
            return None
        self._compare(recorded, draw)
        self._next += 1
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
        others = [place for place, size in enumerate(shape) if size != numbers.shape[place]]
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

    def _compare(self, recorded: Draw, draw: Draw) -> None:
        """Note whether the sample's numbers are drawn from other tensors beside other samples."""
        sample, B = self._sample, self._samples
        if sample is None:
            return
        for before, now in zip(recorded.depends_on, draw.depends_on, strict=False):
            if not before.dim() or len(before) != B or len(now) not in (1, B):
                continue
            first, second = before[sample].double(), now[sample if len(now) == B else 0].double()
            if first.shape != second.shape:
                continue
            tolerance = _RTOL * float(first.abs().max())
            if not torch.allclose(first, second, rtol=_RTOL, atol=tolerance):
                self.mixes = str(draw.func)


class StepWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether anything computes in 16 bits, and may silence noise.

    Where ``silent``, Gaussian draws get their mean, but for those of the loss, which ``draws``
    keeps or repeats; ``generators`` gets the states of the user's generators before they draw.
    """

    in_16_bits = False

    def __init__(
        self,
        *,
        silent: bool,
        draws: Draws | Replay | None = None,
        generators: dict[torch.Generator, Tensor] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.silent = silent
        self.draws = draws or Replay(Draws())
        self.generators = {} if generators is None else generators

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self.silent and name in ("add_noise_", "add_noise_in_threads_"):
            args = *args[:3], 0.0, *args[4:]  # the standard deviation
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and generator not in self.generators:
            self.generators[generator] = generator.get_state()
        out, is_of_loss = self.draws.call(func, args, kwargs)
        if isinstance(out, Tensor) and out.dtype in (torch.bfloat16, torch.float16):
            self.in_16_bits = True
        if self.silent and not is_of_loss and name in ("randn", "randn_like", "normal", "normal_"):
            place = 1 if name == "normal_" else 0
            mean = args[place] if name.startswith("normal") and len(args) > place else 0.0
            out.copy_(mean) if isinstance(mean, Tensor) else out.fill_(mean)
        return out


def _state_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the state of the generator from which an operator may draw; None if it does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator")
    if generator is None:
        tensors = [value for value in args if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        else:
            generator = torch.default_generator
    return id(generator), generator.get_state().numpy().tobytes()
