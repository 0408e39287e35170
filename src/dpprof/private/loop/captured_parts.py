"""Runs the parts of a private loop as CUDA graphs, as long as that is possible.

Shape legend: B samples of a part.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from dpprof.private.capture.captured_step import CapturedStep
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.norms import placement
from dpprof.private.samples.random_state import random_state_kept

_log = logging.getLogger("dpprof")

EXECUTIONS = ("auto", "eager")
"""As CUDA graphs where that is possible, or always as an ordinary loop."""

_PRICE_OF_A_GRAPH = 4
"""How many samples take as long as what a replay does for any number of them."""

_FEW = 8
"""Replays for each capture below which captures cost more than they save."""

_MOST_CAPTURES = 4
"""Captures after which their use is judged."""


class Part(NamedTuple):
    """A part of a Poisson batch."""

    size: int
    is_last: bool
    is_empty: bool
    """Whether its one sample stands for a batch without samples."""

    state: Tensor
    """Of the generator, once the batch was drawn."""


class ToClip(NamedTuple):
    """A part, and what computes its losses."""

    part: Part
    losses_of: Callable[..., Tensor]
    inputs: Sequence[Any]
    named: Mapping[str, Any]

    def compute_losses(self) -> Tensor:
        """Compute the loss of each sample; (B,)."""
        return self.losses_of(*self.inputs, **self.named)


class CapturedParts:
    """Clips parts by replaying graphs, and says once why it does not.

    Args:
        optimizer: On one rank.
        part_size: The samples of a graph (``find_part_size``).
    """

    def __init__(self, optimizer: NoisyOptimizer, part_size: int) -> None:
        self._step = CapturedStep(_call, optimizer, part_size)
        self._optimizer = optimizer
        self._structure: pytree.TreeSpec | None = None
        self._added: list[ToClip] = []
        self._tensors: list[Tensor] = []
        """Of the last part."""

        self._is_off = self._is_ordinary = False
        """Whether no batch is replayed any more, or this one is not."""

        self._replays = 0
        self._resumes_after: Any = None
        """The shapes of the batch before a state that was loaded, if one like it is replayed."""

        self.waits_for_step = False
        """Whether the last part was added, and had no step yet."""

    @property
    def is_open(self) -> bool:
        """Whether parts of a batch were added that is not finished."""
        return bool(self._added)

    @property
    def is_captured(self) -> bool:
        """Whether a batch like the last one is replayed."""
        return self._step.is_captured

    def add(self, to_clip: ToClip) -> Tensor | None:
        """Clip a part by replaying graphs.

        Returns:
            Its losses, (B,), detached; or None, where the whole batch is to run as an ordinary
            loop, first what ``take_parts`` returns.
        """
        self._tensors = [] if self._is_off else self._find_tensors(to_clip)
        if self._is_off or self._is_ordinary:
            return None
        count = 0 if to_clip.part.is_empty else None
        try:
            self._rehearse(to_clip)
            losses_B = self._step.add(self._tensors, count)
        except Exception as error:  # noqa: BLE001 (the ordinary loop raises it again)
            self._turn_off(str(error))
            losses_B = None
        if losses_B is None:
            self._is_ordinary = True
            return None
        self._replays += 1
        self._added.append(to_clip)
        self.waits_for_step = True
        return losses_B

    def finish(self) -> bool:
        """Step on the parts that were added; if not, nothing changed, and ``add`` says what to do.

        Raises:
            RuntimeError: Noise was drawn, and something failed since.
        """
        self.waits_for_step = False
        before = self._optimizer.steps
        try:
            is_done = self._step.is_as_before(self._tensors) and self._step.finish()
        except Exception as error:
            if self._optimizer.steps != before:
                self.drop()
                raise
            self._turn_off(str(error))
            is_done = False
        self._is_ordinary = not is_done
        if is_done:
            self._added.clear()
        captures = self._step.captures
        if captures > _MOST_CAPTURES and self._replays < _FEW * captures:
            self._turn_off("shapes, settings or what the model reads change too often")
        return is_done

    def take_parts(self) -> list[ToClip]:
        """Return the parts that were added, and forget them."""
        added, self._added = self._added, []
        self._step.drop()
        self.waits_for_step = False
        return added

    def run_ordinary(self) -> None:
        """Note that this batch runs as an ordinary loop.

        Raises:
            RuntimeError: Parts of it were replayed.
        """
        if self.is_open:
            raise RuntimeError(
                "parts of this batch came with the function of the losses, and this one with "
                "losses; give backward the same for all parts of a batch"
            )
        self._is_ordinary, self._tensors = True, []

    def end_ordinary(self) -> None:
        """Note that a batch ended that ran as an ordinary loop."""
        if self._tensors and not self._is_off:
            self._step.note(self._tensors)
        self._is_ordinary = False

    def drop(self) -> None:
        """Forget the batch at hand."""
        self.take_parts()
        self._is_ordinary = False

    def state_dict(self) -> dict[str, Any]:
        """Return what decides whether the next batch is replayed: that rounds otherwise."""
        return {
            "is_off": self._is_off,
            "part_size": self._step.part_size,
            "shapes": _describe(self._tensors),
            "captures": self._step.captures - self.is_captured,
            "replays": self._replays,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the next batch as the run that was saved does."""
        self._step.forget()
        self._step.part_size = state["part_size"]
        self._is_off, self._resumes_after = state["is_off"], state["shapes"]
        self._step.captures, self._replays = state["captures"], state["replays"]

    def _rehearse(self, to_clip: ToClip) -> None:
        """Verify the first batch after a state as an ordinary loop does, so that it is replayed."""
        shapes, self._resumes_after = self._resumes_after, None
        if not shapes or shapes != _describe(self._tensors):
            return
        clipping = self._optimizer.clipping
        counts = clipping.batches, clipping.nonfinite_samples_total
        with random_state_kept():
            losses_B = to_clip.compute_losses()
            clipping.backward(losses_B[:0] if to_clip.part.is_empty else losses_B)
        clipping.batches, clipping.nonfinite_samples_total = counts
        self._optimizer.clear_sums()
        self._step.note(self._tensors)

    def _find_tensors(self, to_clip: ToClip) -> list[Tensor]:
        """Return the tensors of a part, and let the step compute the losses of such ones."""
        leaves, structure = pytree.tree_flatten((to_clip.inputs, dict(to_clip.named)))
        for leaf in leaves:
            if not (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == to_clip.part.size):
                shape = f" of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else ""
                self._turn_off(
                    "graphs take tensors with one row for each sample, and a batch of "
                    f"{to_clip.part.size} has a {type(leaf).__name__}{shape}"
                )
                return []
        if structure != self._structure:
            self._structure = structure
        self._step.losses_of = partial(_call, to_clip.losses_of, self._structure)
        return leaves

    def _turn_off(self, why: str) -> None:
        self._is_off = True
        self._step.forget()
        _log.warning("steps run as an ordinary loop, and not as CUDA graphs: %s", why)


def _describe(tensors: Sequence[Tensor]) -> list[tuple[list[int], str]]:
    return [(list(tensor.shape[1:]), str(tensor.dtype)) for tensor in tensors]


def _call(losses_of: Callable[..., Tensor], structure: pytree.TreeSpec, *tensors: Tensor) -> Tensor:
    """Compute losses from the tensors that were taken out of the arguments."""
    inputs, named = pytree.tree_unflatten(tensors, structure)
    return losses_of(*inputs, **named)


def capture_parts(
    optimizer: NoisyOptimizer, execution: str, max_batch_size: int | None
) -> CapturedParts | None:
    """Return what runs parts as graphs; None where ``execution`` or the device does not.

    A warning says so where there are several ranks.
    """
    clipping = optimizer.clipping
    if not placement.is_cuda(next(clipping.model.parameters())) or execution == "eager":
        return None
    if clipping.ranks.size > 1 or clipping.ranks.is_sharded:
        _log.warning("steps run as an ordinary loop, and not as CUDA graphs: there are more ranks")
        return None
    expected = optimizer.expected_batch_size
    assert expected is not None
    return CapturedParts(optimizer, find_part_size(expected, max_batch_size))


def refuse_execution(execution: str) -> None:
    """Refuse what is no execution of a loop (``ValueError``)."""
    if execution not in EXECUTIONS:
        raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}, and is {execution!r}")


def find_part_size(expected: float, most: int | None) -> int:
    """Return the samples of a graph with which batches of a mean size take least time.

    A graph of p samples is replayed about n / p + 1 / 2 times for n samples, each time in that of
    p + 4: that is least where p is the root of 8 n.

    Args:
        expected: The mean batch size, n.
        most: The most samples at a time; None for any number.
    """
    best = max(1, round(math.sqrt(2 * _PRICE_OF_A_GRAPH * expected)))
    return best if most is None else min(best, most)
