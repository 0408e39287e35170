"""Ratios of predicted times, with intervals that leave out the errors that both times share.

Two methods on one GPU run mostly the same kernels. If products are slower there than predicted,
both methods are, and their ratio stays. So a step is split into parts, and each error scales the
parts that it is about, in both steps: all kernels of a GPU together (its clock), kernels of one
kind (products, attention, norms ...), what only one of the steps runs of a kind, the host, the
Python of a private method, and exchanges between ranks. What an error changes of both alike
cancels out. Steps on different GPUs, and on different numbers of them, share no error.

The split is an estimate from the FLOPs and bytes that a result has by phase and kind. It decides
how wide an interval is; the ratio itself is that of the predicted times.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.target import Dtype, Target
from dpprof.experiments.records.advice import StepParts, Stretch
from dpprof.experiments.records.result import PredictedTime, Result
from dpprof.experiments.records.step_costs import Work
from dpprof.experiments.records.terms import OpKind, Phase
from dpprof.results.analysis.tables.axes import BASELINE, target_text

_Z_90 = 1.645  # standard deviations on each side of the median in a 90 % interval

UPDATE: tuple[Phase, ...] = ("noise", "step")
"""The phases that run once, however many batches a gradient is accumulated over."""

HOST_S = 33e-6  # seconds of the host for an operator, as step times are predicted with
_KERNEL_S = 3e-6  # seconds of a kernel beyond its work

_OF_PEAK: Mapping[OpKind, float] = {"gemm": 0.7, "einsum": 0.6, "attention": 0.45, "norm": 0.4}
"""Shares of the peak that kernels of these kinds reach, about."""

_OF_BANDWIDTH: Mapping[OpKind, float] = {"reduce": 0.62, "indexing": 0.3, "random": 0.6}
"""Shares of the bandwidth, about, where they are far from those of others."""

_OF_OTHERS = 0.85

SPREADS: Mapping[OpKind, float] = {
    **dict.fromkeys(("elementwise", "copy", "optimizer"), 0.1),
    **dict.fromkeys(("attention", "norm", "clip", "reduce", "other"), 0.2),
    "random": 0.15,
    "indexing": 0.5,
}
"""Standard deviations of the logarithm of the time of all kernels of a kind, as predicted times
have them (``predict.step_time.gpu_model``). Those of products follow from what they rest on."""

_PRODUCTS: Mapping[str, float] = {
    "measured at this shape": 0.05,
    "interpolated": 0.08,
    "extrapolated": 0.16,
    "data sheet": 0.2,
}
_TABLES: Mapping[OpKind, str] = {"einsum": "gemm"}
"""Kinds whose times rest on the table of another one."""

_CONVOLUTIONS = 0.4  # the spread of products of image models: their speed is a guess
_OF_A_PROCESSOR = 10.0  # FLOPs for each byte that a processor moves in the same time, about

OWN: Mapping[str, float] = {"measured": 1.0, "data sheet": 2.0, "convolutions": 2.5}
"""Spread of what one step runs more of a kind than the other, over that of the whole kind.

Other shapes and other kernels of that kind may be off in another direction. By what products rest
on, it is the least of some factors at which 9 of 10 measured ratios are inside (perf/ratios.md)."""

_DEVICE = 0.1
"""Spread of all kernels of a GPU together: clocks and cooling differ. Where both steps wait for
kernels alone, it cancels out."""

_HOST = 0.35  # spread of the host's time for all operators, as predicted times have it

_PYTHON = 0.5
"""Spread of the host's time of a private method: clipping runs more Python for an operator than a
model does. A step of flash-bk that waits for its host took 1.6 times as long on an H100 as
predicted (perf/measured_steps.md)."""

_EXCHANGES = 0.2
"""Spread of all that ranks exchange together: a guess, between what is measured inside of a node
and between nodes (perf/collective_tables.md)."""

_RUN = 0.01  # spread of a step's time between runs: equal steps were measured 0.5 to 1.3 % apart

_SHAPES = 0.03
"""Spread of kernels that run with half the batch, or less: products of shapes between measured ones
are 2.4 to 4.1 % off in the median (docs/numbers/step-time.md), and a step has some shapes."""


class Ratio(NamedTuple):
    """A predicted time over another, with a 90 % interval; nulls and a reason where unknown."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None

    @property
    def holds_one(self) -> bool:
        """Whether no difference is predicted."""
        return self.low is not None and self.high is not None and self.low <= 1 <= self.high

    def times(self, factor: float) -> "Ratio":
        """Return the ratio and its interval, multiplied."""
        value, low, high = (None if end is None else end * factor for end in self[:3])
        return Ratio(value, low, high, self.reason)

    def named(self, name: str) -> dict[str, float | None]:
        """Return ratio and interval as the fields ``<name>``, ``<name>_low``, ``<name>_high``."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def split(result: Result) -> StepParts | None:
    """Split the predicted step of a result; None where no time is predicted.

    Times are a GPU's seconds for a token of its own batch.
    """
    step = None if result.time is None else result.time.predicted_step_s
    if step is None:
        return None
    experiment = result.experiment
    capacity = result.capacity
    batch = experiment.batch_size if capacity is None else capacity.stated_batch_size
    work = [] if result.io is None else result.io.by_phase_and_op_kind
    return split_step(step, work, experiment, batch)


def split_step(
    step: PredictedTime, work: Sequence[Work], experiment: Experiment, samples: int
) -> StepParts:
    """Split a predicted step of so many samples by its FLOPs and bytes."""
    tokens = experiment.accumulation * experiment.tokens_in(samples)
    target = registry.find_gpu(experiment.target)
    exchange_share = step.communication_share or 0.0
    busy_s = step.median * max(1.0 - step.waiting_share - exchange_share, 0.0)
    guesses = {
        (some.phase, some.op_kind): _guess_seconds(some, target, experiment.dtype)
        for some in work
        if some.op_kind != "communication"
    }
    guessed_s = math.fsum(guesses.values())
    kernels = {
        cell: busy_s * guess / guessed_s / tokens for cell, guess in guesses.items() if guess > 0
    }
    host_s: dict[bool, float] = {False: 0.0, True: 0.0}
    for some in work:
        if experiment.execution != "graph":
            host_s[some.phase in UPDATE] += HOST_S * some.ops
    if target is None:  # a processor runs what it issues
        total = math.fsum(host_s.values()) or 1.0
        host_s = {of: step.median * step.waiting_share * s / total for of, s in host_s.items()}
    each, update = (
        Stretch(
            seconds=seconds / tokens,
            kernels={cell: s for cell, s in kernels.items() if (cell[0] in UPDATE) is of_update},
            host=host_s[of_update] / tokens,
            exchange=0.0 if of_update else exchange_share * step.median / tokens,
        )
        for of_update, seconds in ((False, step.median - step.update), (True, step.update))
    )
    basis, of_products = _find_products(step, experiment)
    whole = find_spread(step.low, step.high)  # both steps are of one program and machine
    has_python = experiment.method != BASELINE and experiment.execution != "graph"
    return StepParts(
        device=f"{experiment.world_size} x {target_text(experiment)}, {experiment.dtype}",
        method=experiment.method,
        samples=samples,
        spread=math.sqrt(max(whole**2 - step.between_sources**2, 0.0)),
        of_products=of_products,
        own=OWN[basis],
        of_python=_PYTHON if has_python and target is not None else 0.0,
        each=each,
        update=update,
    )


def _guess_seconds(work: Work, target: Target | None, dtype: Dtype) -> float:
    """Guess the seconds of kernels on a target, or on a processor; only their shares count."""
    peak = None if target is None else target.peak(dtype)
    flops_per_s, bytes_per_s, kernel_s = _OF_A_PROCESSOR, 1.0, 0.0
    if target is not None and peak is not None:
        flops_per_s, bytes_per_s, kernel_s = peak, target.bandwidth_bytes_per_s, _KERNEL_S
    moving_s = (work.read + work.written) / bytes_per_s
    computing_s = work.flops / flops_per_s / _OF_PEAK.get(work.op_kind, math.inf)
    moving_s /= _OF_BANDWIDTH.get(work.op_kind, _OF_OTHERS)
    return max(moving_s, computing_s) + kernel_s * work.ops


def _find_products(step: PredictedTime, experiment: Experiment) -> tuple[str, float]:
    """Return what products rest on, a key of ``OWN``, and the spread of all of them together.

    Where anything rests on measured products, all do. Of image models most are convolutions, which
    no GPU has a table of.
    """
    if experiment.image_size is not None and experiment.device == "cuda":
        return "convolutions", _CONVOLUTIONS
    shares = {basis: share for basis, share in step.rests_on.items() if basis != "data sheet"}
    total = math.fsum(shares.values())
    if not total:
        return "data sheet", _PRODUCTS["data sheet"]
    spread = math.fsum(_PRODUCTS[basis] * share for basis, share in shares.items()) / total
    return "measured", spread


_Error = tuple[str, ...]
"""The name of an error. What has the same name in both steps is off in the same direction."""


class _Piece(NamedTuple):
    """Seconds, and the spread that each error gives them."""

    seconds: float
    spreads: Mapping[_Error, float]

    def run(self, error: _Error | None, sigmas: float) -> float:
        """Return the seconds where an error is so many standard deviations."""
        spread = self.spreads.get(error) if error else None
        return self.seconds * math.exp(sigmas * spread) if spread else self.seconds


class _Pieces(NamedTuple):
    """A stretch, cut by what its errors are."""

    stretch: Stretch
    kernels: Sequence[_Piece]
    host: _Piece
    exchange: _Piece

    @property
    def errors(self) -> set[_Error]:
        """The names of all errors."""
        pieces = (*self.kernels, self.host, self.exchange)
        return {error for piece in pieces for error in piece.spreads}

    def run(self, error: _Error | None = None, sigmas: float = 0.0) -> float:
        """Return the seconds where an error is so many standard deviations.

        The host issues while the device runs. So the longer of both counts, and of the shorter one
        the share that the prediction has.
        """
        device_s, host_s = math.fsum(piece.seconds for piece in self.kernels), self.stretch.host
        most, least = max(host_s, device_s), min(host_s, device_s)
        alone_s = self.stretch.seconds - self.stretch.exchange
        share = min(max((alone_s - most) / least, 0.0), 1.0) if least else 0.0
        device_now = math.fsum(piece.run(error, sigmas) for piece in self.kernels)
        now = device_now, self.host.run(error, sigmas)
        longer = (max(now) + share * min(now)) / (most + share * least) if most else 1.0
        return alone_s * longer + self.exchange.run(error, sigmas)


def compare(first: StepParts | None, second: StepParts | None, reason: str = "") -> Ratio:
    """Return the time of a token of one step over that of another, with its interval.

    Errors are independent, so the logarithms by which each shifts the ratio add up as squares.

    Args:
        first: The step whose time is divided.
        second: The step whose time it is divided by.
        reason: Why a time is not known, where one is not.

    Returns:
        ``compare(b, a)`` is one over ``compare(a, b)``; the ratio of equal steps is exactly 1.
    """
    if first is None or second is None:
        return Ratio(None, reason=reason or "no time is predicted")
    if (first.device, first.each, first.update) == (second.device, second.each, second.update):
        return Ratio(1.0, 1.0, 1.0)
    if first.device != second.device or not (first.each.kernels and second.each.kernels):
        return compare_apart(first.seconds / second.seconds, first.spread, second.spread)
    ours, theirs = _cut(first, second, "first"), _cut(second, first, "second")

    def shift(error: _Error | None, sigmas: float) -> float:
        """Return the logarithm of the ratio where an error is so many standard deviations."""
        times = (math.fsum(pieces.run(error, sigmas) for pieces in side) for side in (ours, theirs))
        return math.log(next(times) / next(times))

    middle = shift(None, 0.0)
    below = above = 0.0
    for error in sorted(set().union(*(pieces.errors for pieces in (*ours, *theirs)))):
        ends = [shift(error, sigmas) - middle for sigmas in (-_Z_90, _Z_90)]
        below, above = math.hypot(below, min(*ends, 0.0)), math.hypot(above, max(*ends, 0.0))
    return Ratio(math.exp(middle), math.exp(middle - below), math.exp(middle + above))


def compare_apart(value: float, spread: float, other_spread: float) -> Ratio:
    """Return a ratio of times that share no error, as on different GPUs.

    Spreads are standard deviations of the logarithms of both times.
    """
    factor = math.exp(_Z_90 * math.hypot(spread, other_spread))
    return Ratio(value, value / factor, value * factor)


def find_spread(low: Any, high: Any) -> float:
    """Return the standard deviation of the logarithm of a time, of its 90 % interval."""
    return math.log(high / low) / 2 / _Z_90


def accumulate(parts: StepParts, batches: float) -> StepParts:
    """Return the parts of a step that adds up the gradients of so many batches."""
    update = parts.update
    kernels = {cell: seconds / batches for cell, seconds in update.kernels.items()}
    fewer = [seconds / batches for seconds in (update.seconds, update.host, update.exchange)]
    return parts._replace(update=Stretch(fewer[0], kernels, *fewer[1:]))


def _cut(step: StepParts, other: StepParts, side: str) -> list[_Pieces]:
    """Cut a step into what both run and what it alone runs, and name the errors of each."""
    cut = []
    run: dict[_Error, float] = {("run", side): _RUN}
    halvings = min(abs(math.log2(step.samples / other.samples)), 1.0)
    shapes: dict[_Error, float] = {("shapes", side): _SHAPES * halvings}
    for stretch, theirs in ((step.each, other.each), (step.update, other.update)):
        kernels = []
        for (phase, kind), seconds in stretch.kernels.items():
            spread = SPREADS.get(kind, step.of_products)
            spreads = {
                **run,
                **shapes,
                ("device",): _DEVICE,
                ("kind", _TABLES.get(kind, kind)): spread,
            }
            shared_s = min(seconds, theirs.kernels.get((phase, kind), 0.0))
            own = {**spreads, ("own", side, kind): step.own * spread}
            pieces = _Piece(shared_s, spreads), _Piece(seconds - shared_s, own)
            kernels += [piece for piece in pieces if piece.seconds]
        host = {**run, ("host",): _HOST, ("python", step.method): step.of_python}
        exchange = _Piece(stretch.exchange, {**run, ("exchanges",): _EXCHANGES})
        cut.append(_Pieces(stretch, kernels, _Piece(stretch.host, host), exchange))
    return cut
