"""Runs the parts of a private loop as CUDA graphs, as long as that is possible.

Shape legend: B samples of a part.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpprof.private.capture.conditions import Surroundings, look_around
from dpprof.private.capture.replays import Replays
from dpprof.private.capture.step_graphs import buffers_kept
from dpprof.private.errors import is_own
from dpprof.private.loop.public_numbers import PublicNumbers
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.norms import placement
from dpprof.private.samples.users import Segments

_log = logging.getLogger("dpprof")

EXECUTIONS = ("auto", "eager")  # as CUDA graphs where possible, or as an ordinary loop
_PRICE_OF_A_GRAPH = 4  # how many samples take as long as what a replay does for any number of them
_FEW = 8  # replays for each capture below which captures cost more than they save
_MOST_CAPTURES = 4  # captures after which their use is judged
_MOST_ORDINARY = 50  # ordinary batches in turn after which no batch is looked at any more

_TOO_OFTEN = "shapes, settings or what the model reads change too often"


class Part(NamedTuple):
    """A part of a Poisson batch."""

    size: int
    is_last: bool
    is_empty: bool  # whether its one sample stands for a batch without samples
    state: Tensor  # of the generator, once the batch was drawn
    fold: int = 0  # of the data, from which the batch was drawn
    users: Segments | None = None  # how many samples each user has; None for sample by sample


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
    """Clips parts by replaying graphs of ``part_size`` samples, and says once why it does not."""

    def __init__(self, optimizer: NoisyOptimizer, part_size: int) -> None:
        self._replays = Replays(optimizer, part_size, _call)
        self._optimizer = optimizer
        self._structure: pytree.TreeSpec | None = None
        self._added: list[ToClip] = []  # of a batch not finished, with copies of tensors
        self._tensors: list[Tensor] = []  # of the last part
        self._is_off = self._is_ordinary = False  # for all batches; for this one
        self._replayed = self._in_turn = 0  # parts that were replayed, and ordinary batches since
        self._resumed: tuple[Mapping[str, Any], Surroundings] | None = None
        """A state that was loaded, and what surrounded it, until the first batch."""

        self._was_verified = False  # whether the run that was saved had verified its first batch
        self._buffers: dict[Tensor, int] | None = None  # their versions before an ordinary batch
        self.waits_for_step = False  # whether the last part was added, and had no step yet

    @property
    def is_open(self) -> bool:
        """Whether parts of a batch were added that is not finished."""
        return bool(self._added)

    @property
    def is_captured(self) -> bool:
        """Whether a batch like the last one is replayed."""
        return self._replays.is_captured

    def add(self, to_clip: ToClip) -> Tensor | None:
        """Clip a part by replaying graphs; return its losses, (B,), detached.

        None, where the whole batch is to run as an ordinary loop, first what ``take_parts``
        returns. ``RuntimeError``: the part before had no step.
        """
        if self.waits_for_step:
            raise RuntimeError("the part before was clipped and had no step; call step() first")
        self._tensors = [] if self._is_off else self._find_tensors(to_clip)
        if self._is_off or self._is_ordinary:
            return None
        self._verify_again(to_clip)
        count = 0 if to_clip.part.is_empty else None
        clipping = self._optimizer.clipping
        try:
            with clipping.first_batch_trusted() if self._was_verified else nullcontext():
                losses_B = self._replays.add(self._tensors, count)
        except Exception as error:  # noqa: BLE001 (the ordinary loop raises it again)
            self._turn_off(_say(error))
            losses_B = None
        except BaseException:  # nobody knows how far it came
            self._optimizer.discard()
            raise
        if losses_B is None:
            self._is_ordinary, self._buffers = True, _read_buffers(self._optimizer.clipping.model)
            return None
        self._replayed += 1
        self._in_turn = 0
        assert self._structure is not None
        inputs, named = pytree.tree_unflatten(self._tensors, self._structure)
        self._added.append(to_clip._replace(inputs=inputs, named=named))
        self.waits_for_step = True
        return losses_B

    def finish(self) -> bool:
        """Step on the parts that were added, unless ``add`` is to be asked what to do with them."""
        before = self._optimizer.steps
        try:
            is_done = self._replays.finish()
        except BaseException as error:
            if self._optimizer.steps != before or not isinstance(error, Exception):
                self._optimizer.discard()
                raise
            self._turn_off(_say(error))
            is_done = False
        self._is_ordinary = not is_done
        if is_done:
            self._added.clear()
        self.waits_for_step = False
        captures = self._replays.captures
        if captures > _MOST_CAPTURES and self._replayed < _FEW * captures:
            self._turn_off(_TOO_OFTEN)
        return is_done

    def take_parts(self) -> list[ToClip]:
        """Return the parts that were added, and forget them."""
        added, self._added = self._added, []
        self._replays.drop()
        self.waits_for_step = False
        return added

    def run_ordinary(self) -> None:
        """Note that this batch, no part of which was replayed, runs by losses that were given."""
        if self.is_open:
            raise RuntimeError(
                "parts of this batch came with the function of the losses, and this one with "
                "losses; give backward the same for all parts of a batch"
            )
        self._is_ordinary, self._tensors = True, []
        self._replays.forget_all()

    def end_ordinary(self) -> None:
        """Note that a batch ended that ran as an ordinary loop."""
        self._is_ordinary = False
        before, self._buffers = self._buffers, None
        if not self._tensors or self._is_off:
            return
        after = _read_buffers(self._optimizer.clipping.model)
        if before is not None and before != after:
            # How often a graph runs follows from the number of samples, which is private.
            self._turn_off("the model writes a buffer in forward")
            return
        self._replays.note(self._tensors)
        self._in_turn += 1
        if self._in_turn > _MOST_ORDINARY:
            self._turn_off(_TOO_OFTEN)

    def drop(self) -> None:
        """Forget the batch at hand."""
        self.take_parts()
        self._is_ordinary = False

    def state_dict(self) -> dict[str, Any]:
        """Return what decides whether the next batch is replayed: that rounds otherwise."""
        is_on = bool(self._tensors) and not self._is_off
        would_replay = is_on and self._replays.would_replay(self._tensors)
        return {
            "is_off": self._is_off,
            "part_size": self._replays.part_size,
            "captures": self._replays.captures,
            "is_captured": self.is_captured,
            "is_verified": self._was_verified or self._optimizer.clipping.first_batch_verified,
            "replayed": self._replayed,
            "in turn": self._in_turn,
            "replays": _describe(self._tensors) if would_replay else None,
            "trained": _list_trained(self._optimizer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the next batch as the run that was saved does."""
        self._replays.forget_all()
        self._tensors = []
        self._replays.part_size, self._replays.captures = state["part_size"], state["captures"]
        self._replayed, self._in_turn = state["replayed"], state["in turn"]
        self._is_off, self._was_verified = state["is_off"], state["is_verified"]
        self._resumed = state, look_around(self._optimizer, _call, [])

    def _verify_again(self, to_clip: ToClip) -> None:
        """Clip a part with all checks, and throw its sums away, where that is due.

        It is at random steps, with ``verify_every``; and after a state was loaded, where the run
        that was saved goes on replaying: before the first batch, and on the first samples of which
        several show whether they are mixed.
        """
        if self.is_open:
            return
        clipping, resumed = self._optimizer.clipping, self._resumed
        self._resumed = None
        is_resumed = (
            resumed is not None
            and resumed[0]["replays"] == _describe(self._tensors)
            and resumed[0]["trained"] == _list_trained(self._optimizer)
            and look_around(self._optimizer, _call, []).are_those_of(resumed[1])
        )
        is_unseen = self._was_verified and not clipping.first_batch_verified
        is_due = is_unseen and to_clip.part.size > 1 and self._replays.is_captured
        repeated = clipping.repeated
        if repeated is not None and self._replays.would_replay(self._tensors) and repeated.draw():
            is_due = repeated.is_forced = True
        if is_resumed or is_due:
            count = 0 if to_clip.part.is_empty else None
            with buffers_kept(clipping.model):
                self._replays.rehearse(lambda: to_clip.compute_losses()[:count], self._tensors)
        if is_resumed and resumed is not None:
            self._replays.captures -= resumed[0]["is_captured"]

    def _find_tensors(self, to_clip: ToClip) -> list[Tensor]:
        """Return copies of a part's tensors: others may write these before the step; or none."""
        leaves, structure = pytree.tree_flatten((list(to_clip.inputs), dict(to_clip.named)))
        for leaf in leaves:
            if not (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == to_clip.part.size):
                self._turn_off(
                    "graphs take tensors with one row for each sample, and a batch has a "
                    f"{type(leaf).__name__} that is none"
                )
                return []
        if structure != self._structure:
            self._structure = structure
        self._replays.losses_of = partial(_call, to_clip.losses_of, self._structure)
        device = next(self._optimizer.clipping.model.parameters()).device
        return [leaf.detach().to(device, copy=True) for leaf in leaves]

    def _turn_off(self, why: str) -> None:
        if not self._is_off:
            self._is_off = True
            first = (why.splitlines() or [""])[0]
            _log.warning("steps run as an ordinary loop, and not as CUDA graphs: %s", first)
        self._replays.forget_all()


def _say(error: BaseException) -> str:
    """Return what dpprof raised; of what others raise, which may quote a sample, the kind."""
    return str(error) if is_own(error) else f"one raises {type(error).__name__}"


def _list_trained(optimizer: NoisyOptimizer) -> list[bool]:
    return [parameter.requires_grad for parameter in optimizer.every_parameter]


def _read_buffers(model: nn.Module) -> dict[Tensor, int]:
    return {buffer: buffer._version for buffer in model.buffers()}  # noqa: SLF001 (no public name)


def _describe(tensors: Sequence[Tensor]) -> list[tuple[list[int], str]]:
    return [(list(tensor.shape[1:]), str(tensor.dtype)) for tensor in tensors]


def _call(losses_of: Callable[..., Tensor], structure: pytree.TreeSpec, *tensors: Tensor) -> Tensor:
    inputs, named = pytree.tree_unflatten(tensors, structure)
    return losses_of(*inputs, **named)


def capture_parts(
    optimizer: NoisyOptimizer,
    execution: str,
    max_batch_size: int | None,
    numbers: PublicNumbers,
) -> CapturedParts | None:
    """Return what runs parts as graphs; None where ``execution`` or the device does not.

    A warning says so where there are several ranks, or whole users. Where batches have a largest
    number of samples, they are one graph of so many, if no less is the most at a time.
    """
    clipping = optimizer.clipping
    if not placement.is_cuda(next(clipping.model.parameters())) or execution == "eager":
        return None
    reasons = {
        "the bound moves": optimizer.quantile is not None,
        "there are more ranks": clipping.ranks.size > 1 or clipping.ranks.is_sharded,
        "the unit is a user, of any size": numbers.unit == "user",
    }
    if why := next((reason for reason, holds in reasons.items() if holds), None):
        _log.warning("steps run as an ordinary loop, and not as CUDA graphs: %s", why)
        return None
    expected = optimizer.expected_batch_size
    assert expected is not None
    size, largest = find_part_size(expected, max_batch_size), numbers.largest_of_rank
    return CapturedParts(
        optimizer, size if largest is None else min(largest, max_batch_size or largest)
    )


def refuse_execution(execution: str) -> None:
    """Refuse what is no execution of a loop (``ValueError``)."""
    if execution not in EXECUTIONS:
        raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}, and is {execution!r}")


def find_part_size(expected: float, most: int | None) -> int:
    """Return the samples of a graph with which batches of a mean size, n, take least time.

    A graph of p samples is replayed about n / p + 1 / 2 times for n samples, each time in that
    of p + 4: that is least where p is the root of 8 n.
    """
    best = max(1, round(math.sqrt(2 * _PRICE_OF_A_GRAPH * expected)))
    return best if most is None else min(best, most)
