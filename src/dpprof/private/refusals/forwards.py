"""Refuses steps whose forward wrote a parameter, which the optimizer's ``step()`` alone changes.

Between a step and the next forward, parameters belong to the user: averages of weights are swapped
in, a checkpoint is loaded, weights are clamped. From the beginning of a forward until the end of
its backward they stay as they are. A parameter that forward writes, as ActNorm does with its first
batch's mean, is released without noise.

A forward begins where the model is called, or, where a program calls its layers alone, at the first
layer that runs with gradients. It proves, for each forward that a ``backward`` differentiates, and
for each call of the model, also without gradients:

* Nothing replaced parameters or wrote them in place: their versions and addresses say so.
* Nothing wrote an element that is read through ``.data``, which leaves versions as they are. Each
  of the ``FIRST`` first steps reads, and each later one with the probability ``SHARE``: all of a
  parameter with up to ``MOST`` elements; of a larger one every k-th, k odd, from a random one on,
  ``MOST / 3`` at least. So a write of k elements in a row is seen. Calls that no ``backward``
  differentiates read only until the ``FIRST`` first steps end. Parameters of shards, and of classes
  of their own, are not read.

Frozen parameters are watched in the same way; ``released_state`` says what else is asked of them.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from dpprof.private.refusals.tensor_kinds import find_unusual

FIRST = 3  # how many steps at the beginning always read parameters
SHARE = 1 / 16  # the share of later steps that read them, on average
MOST = 1024  # the most elements of a parameter that are read

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Forward:
    """Parameters as they were when a forward began.

    ``marks`` are the versions of all, and then the addresses of those that can be read;
    ``sums`` those of the bits that were read, by the name of what has them; ``is_early`` says
    that each parameter was read by itself.
    """

    __slots__ = ("is_early", "marks", "sums")

    def __init__(self, marks: list[int], sums: dict[str, list[int]], *, is_early: bool) -> None:
        self.marks, self.sums, self.is_early = marks, sums, is_early


class Forwards:
    """The forwards of a model since the last backward.

    Parameters with ``names`` may only be changed by a step. ``may_read`` tells whether numbers
    may be read, for which this waits for the device.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], may_read: Callable[[], bool]) -> None:
        self._names, self._may_read = names, may_read
        self._numbers = {parameter: number for number, parameter in enumerate(names)}
        self._draws = random.SystemRandom()
        self._read = {
            parameter: self._draws.randrange(2**31)
            for parameter in names
            if type(parameter) is nn.Parameter and find_unusual(parameter) is None
        }
        """The place from which each parameter that can be read is read."""

        self.steps = 0
        self._last: Forward | None = None
        self._differentiated: set[Forward] = set()
        self._problem: str | None = None

    def begin(self) -> Forward:
        """Note the state of parameters as a forward begins."""
        is_early = self.steps < FIRST
        is_read = self._can_read() and (is_early or self._draws.random() < SHARE)
        sums = self._read_bits(each=is_early) if is_read else {}
        self._last = Forward(self._read_marks(), sums, is_early=is_early)
        return self._last

    def watcher(self) -> Callable[..., Any]:
        """Return a function that calls the model, uncompiled, and refuses writes of parameters."""
        uncompiled: Any = torch.compiler.disable  # what it needs is imported late
        begin, refuse_change = uncompiled(self.begin), uncompiled(self.refuse_change)

        def watch(call: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
            forward = begin()
            try:
                return call(*inputs, **named)
            finally:  # also where the call fails: what it wrote stays
                refuse_change(forward, reads=forward.is_early)

        reason = "a model that is clipped cannot be compiled; leave out fullgraph=True"
        watching: Callable[..., Any] = uncompiled(watch, recursive=False, reason=reason)
        return watching

    def of(self, layer: nn.Module) -> Forward:
        """Return the forward that a layer's call belongs to."""
        last = self._last
        if last is not None:
            own = [p for p in layer._parameters.values() if p in self._numbers]  # noqa: SLF001
            if all(last.marks[self._numbers[p]] == p._version for p in own):  # noqa: SLF001
                return last
        return self.begin()

    def differentiate(self, forward: Forward | None = None) -> None:
        """Note that a backward came to a forward, or to the last one."""
        forward = forward or self._last
        if forward is not None:
            self._differentiated.add(forward)

    def verify(self) -> None:
        """Refuse a step if a forward wrote a parameter, now or before; may wait for the device."""
        for forward in self._differentiated:
            self.refuse_change(forward)
        if self._problem is not None:
            raise RuntimeError(self._problem)
        self.steps += 1

    def close(self) -> None:
        """Forget the forwards, as backward ends: parameters are the user's again."""
        self._last = None
        self._differentiated.clear()

    def refuse_change(self, forward: Forward, *, reads: bool = True) -> None:
        """Refuse a change of parameters since a forward began, and from then on each ``verify``."""
        marks = self._read_marks()
        if marks != forward.marks:
            pairs = zip([*self._names, *self._read], marks, forward.marks, strict=True)
            changed = next(parameter for parameter, mark, before in pairs if mark != before)
            self._refuse(self._names[changed])
        if reads and forward.sums and self._can_read():
            for name, present in self._read_bits(each=forward.is_early).items():
                if forward.sums.get(name) != present:
                    self._refuse(f"{name}, through .data,")

    def _refuse(self, what: str) -> None:
        self._problem = (
            f"{what} was changed between the beginning of a forward and the end of its backward; "
            "only the optimizer's step may change it, because nothing else adds noise. Write it "
            "before forward, from public numbers alone; or, where forward writes nothing of "
            "samples, name it in public_buffers. To go on, load the parameters of before, and make "
            "a new clipping"
        )
        raise RuntimeError(self._problem)

    def _can_read(self) -> bool:
        is_captured = (
            torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            and torch.cuda.is_current_stream_capturing()
        )
        return self._may_read() and not is_captured

    def _read_marks(self) -> list[int]:
        versions = [parameter._version for parameter in self._names]  # noqa: SLF001
        return versions + [parameter.data_ptr() for parameter in self._read]

    def _read_bits(self, *, each: bool) -> dict[str, list[int]]:
        # Instruments count what a step computes, which is the same in each one.
        with _disable_current_modes(), torch.no_grad():
            return self._sum_bits(each=each)

    def _sum_bits(self, *, each: bool) -> dict[str, list[int]]:
        """Add up the bits of what is read as integers, also times their places, modulo 2^64.

        This waits for the device. Parameters have sums of their own for ``each``, or all of
        a dtype.
        """
        groups: dict[str, list[Tensor]] = defaultdict(list)
        for parameter, start in self._read.items():
            together = f"a parameter of {parameter.dtype} on {parameter.device}"
            groups[self._names[parameter] if each else together].append(_sample(parameter, start))
        sums: dict[str, list[int]] = {}
        for name, parts in groups.items():
            flat = torch.cat(parts).resolve_conj().resolve_neg()
            bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
            places = torch.arange(1, len(bits) + 1, device=bits.device)
            sums[name] = torch.stack([bits.sum(), (bits * places).sum()]).tolist()
        return sums


def _sample(parameter: Tensor, start: int) -> Tensor:
    """Return some elements of a parameter, or all of a small one, as a vector."""
    size = parameter.numel()
    step = -(-size // MOST) | 1
    start %= step
    if not parameter.is_contiguous():
        return parameter.reshape(-1)[start::step]
    count = len(range(start, size, step))
    return parameter.as_strided((count,), (step,), parameter.storage_offset() + start)
