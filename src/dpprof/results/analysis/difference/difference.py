"""Why one run's peak is higher than another's: both peaks, the waterfall, and both timelines.

The timelines stand on one axis, on which the same phases of both steps are at the same place.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from dpprof.experiments.config.loops import LOOPS
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.step_costs import Timeline
from dpprof.experiments.records.terms import Phase
from dpprof.results.analysis.difference.waterfall import Bar, list_holdings, peak_bytes, subtract
from dpprof.results.analysis.tables.axes import axes_of

_ALWAYS_NAMED = (
    *("method", "model", "batch_size", "image_size", "seq_len", "dtype", "device", "target"),
)
"""The axes that are named where both runs share them."""

_NOT_NAMED = {"method", "seed", "warmup_steps", "timed_steps"}  # do not tell peaks apart


class Side(NamedTuple):
    """One of the two: which run it is, and its peak."""

    name: str  # its method, and the axes that distinguish it from the other
    method: str
    experiment_id: str
    instrument: str
    replicate: int
    predicted: bool  # whether nothing ran
    peak_bytes: int
    phase: str  # the phase of the step with the peak
    module: str | None
    op: str | None  # the operator that made the peak; None where the step began with it

    @property
    def how(self) -> str:
        """How its peak is known, and in which phase it is."""
        source = "predicted" if self.predicted else "recorded"
        return f"{source}, in {self.phase.replace('_', ' ')}"


class Stretch(NamedTuple):
    """Operators of one phase that run one after another, in one step or in both."""

    phase: Phase
    start: float
    end: float
    in_a: bool
    in_b: bool


class Curve(NamedTuple):
    """Live bytes over the shared axis."""

    at: list[float]  # positions from 0 to 1, one for each instant of the timeline
    total_bytes: list[int]


class SharedAxis(NamedTuple):
    """Two timelines, drawn over the same phases."""

    stretches: list[Stretch]
    a: Curve
    b: Curve


class Difference(NamedTuple):
    """Why A's peak is higher, or lower, than B's."""

    a: Side
    b: Side
    shared: tuple[str, ...]  # what both runs have in common, in words
    bars: tuple[Bar, ...]  # components; their differences sum to `difference_bytes`
    axis: SharedAxis  # both timelines, of storages alone: rounding of the allocator is not in them

    @property
    def difference_bytes(self) -> int:
        """What A's peak is above B's."""
        return self.a.peak_bytes - self.b.peak_bytes

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        fields: dict[str, Any] = _to_json(self)
        return fields | {"timelines": fields.pop("axis")}


def _to_json(value: Any) -> Any:
    """Return named tuples as mappings, with the difference where they have one."""
    if hasattr(value, "_asdict"):
        fields = {name: _to_json(part) for name, part in value._asdict().items()}
        difference = getattr(value, "difference_bytes", None)
        return fields if difference is None else fields | {"difference_bytes": difference}
    return [_to_json(part) for part in value] if isinstance(value, list | tuple) else value


def explain_difference(a: Result, b: Result) -> Difference:
    """Explain the difference of two runs' peaks; the runs may differ in anything.

    Raises:
        InputError: A result does not record what was live at the peak.
    """
    held = list_holdings(a), list_holdings(b)
    assert a.memory is not None  # it has holdings, and so has the other
    assert b.memory is not None
    assert a.memory.timeline is not None
    assert b.memory.timeline is not None
    axes = axes_of(a.experiment), axes_of(b.experiment)
    for result, side in zip((a, b), axes, strict=True):
        if result.capacity is not None:  # memory is of the batch that it states
            side["batch_size"] = result.capacity.stated_batch_size
    of_a, of_b = _name_apart((a, b), axes)
    return Difference(
        a=_describe(a, of_a),
        b=_describe(b, of_b),
        shared=tuple(
            _format_axes((key for key in _ALWAYS_NAMED if axes[0][key] == axes[1][key]), axes[0])
        ),
        bars=subtract(*held),
        axis=share_axis(a.memory.timeline, b.memory.timeline),
    )


def _describe(result: Result, name: str) -> Side:
    memory = result.memory
    assert memory is not None
    assert memory.at_peak is not None
    return Side(
        name=name,
        method=result.experiment.method,
        predicted=_is_predicted(result),
        peak_bytes=peak_bytes(memory),
        **result.model_dump(include={"experiment_id", "instrument", "replicate"}),
        **memory.at_peak.model_dump(include={"phase", "module", "op"}),
    )


def _is_predicted(result: Result) -> bool:
    """Return whether nothing ran, so that instants have no time."""
    return bool(result.memory and result.memory.timeline and not result.memory.timeline.elapsed_s)


def _name_apart(
    results: tuple[Result, Result], axes: tuple[dict[str, Any], dict[str, Any]]
) -> list[str]:
    """Name both runs by their methods, and by the axes in which they differ."""

    def is_said(key: str) -> bool:  # by the name of its loop
        return all(str(side[key]).lower() == LOOPS[side["loop"]].texts.get(key) for side in axes)

    apart = [
        key
        for key in axes[0]
        if axes[0][key] != axes[1][key] and key not in _NOT_NAMED and not is_said(key)
    ]
    facts = [_format_axes(apart, side) for side in axes]
    methods = [str(side["method"]) for side in axes]
    if methods[0] == methods[1] and facts[0] == facts[1]:
        how = ["predicted" if _is_predicted(result) else "recorded" for result in results]
        facts = [[f"{h}, replicate {r.replicate}"] for h, r in zip(how, results, strict=True)]
    if methods[0] == methods[1] and facts[0] == facts[1]:
        facts = [["A"], ["B"]]
    return [
        f"{method} ({', '.join(words)})" if words else method
        for method, words in zip(methods, facts, strict=True)
    ]


def _format_axes(keys: Iterable[str], axes: Mapping[str, Any]) -> list[str]:
    """Format axes that have a value; a target says which device it is, pixels say the length."""
    formatted = []
    told = {"device": "target", "seq_len": "image_size"}
    for key in keys:
        value = axes[key]
        if value is not None and axes.get(told.get(key, "")) is None:
            words = f"{value:,}" if type(value) is int else str(value)
            formatted.append(f"{key.replace('_', ' ')} {words}")
    return formatted


def share_axis(a: Timeline, b: Timeline) -> SharedAxis:
    """Place the timelines of A's and B's steps on one axis, from 0 to 1 without gaps.

    Steps run different numbers of operators, so operators alone align nothing. A phase that both
    steps have in the same order gets the mean of its shares of the two steps' operators; one that
    only one of them has gets half of its share there. Within a phase operators are spread evenly. A
    curve keeps every instant of its timeline, in order.
    """
    parts = [*_split(a)], [*_split(b)]
    pairs = [*_match(*([part for part in side if part.ops] for side in parts))]
    widths = [sum(part.share for part in pair if part) for pair in pairs]
    ends = [end / sum(widths) for end in accumulate(widths)]
    stretches: list[Stretch] = []
    placed: tuple[dict[int, Stretch], dict[int, Stretch]] = {}, {}
    for pair, start, end in zip(pairs, [0.0, *ends], ends, strict=False):
        phase = next(part.phase for part in pair if part)
        stretch = Stretch(phase, start, end, pair[0] is not None, pair[1] is not None)
        stretches.append(stretch)
        for part, places in zip(pair, placed, strict=True):
            if part is not None:
                places[part.rows.start] = stretch
    return SharedAxis(
        stretches, _draw_curve(a, parts[0], placed[0]), _draw_curve(b, parts[1], placed[1])
    )


class _Part(NamedTuple):
    """The instants of one phase of a timeline, until another phase begins."""

    phase: Phase
    rows: range
    first_op: int
    ops: int  # how many operators ran; 0 for an instant between two phases
    share: float  # the share of the step's operators


def _split(timeline: Timeline) -> Iterator[_Part]:
    ops = timeline.ops
    for phase, rows in groupby(range(len(ops)), key=lambda row: timeline.phase[row]):
        first, *rest = rows
        beyond = rest[-1] + 1 if rest else first + 1
        ran = ops[min(beyond, len(ops) - 1)] - ops[first]
        share = ran / (ops[-1] - ops[0]) if ran else 0.0
        yield _Part(phase, range(first, beyond), ops[first], ran, share)


def _match(a: Sequence[_Part], b: Sequence[_Part]) -> Iterator[tuple[_Part | None, _Part | None]]:
    """Pair the parts of two steps that have the same phase, in order."""
    phases = [part.phase for part in a], [part.phase for part in b]
    matcher = SequenceMatcher(None, *phases, autojunk=False)
    for kind, a_from, a_to, b_from, b_to in matcher.get_opcodes():
        if kind == "equal":
            yield from zip(a[a_from:a_to], b[b_from:b_to], strict=True)
        else:
            yield from ((part, None) for part in a[a_from:a_to])
            yield from ((None, part) for part in b[b_from:b_to])


def _draw_curve(timeline: Timeline, parts: Sequence[_Part], placed: Mapping[int, Stretch]) -> Curve:
    places: list[float] = []
    end = 0.0  # of the phase before, where instants between phases stand
    for part in parts:
        stretch = placed.get(part.rows.start)
        if stretch is None:
            places += [end] * len(part.rows)
            continue
        end = stretch.end
        for row in part.rows:
            done = (timeline.ops[row] - part.first_op) / part.ops
            places.append(stretch.start + done * (end - stretch.start))
    totals = [sum(sizes) for sizes in zip(*timeline.components.values(), strict=True)]
    return Curve(places, totals)
