"""Two memory timelines on one axis: the same phases of both steps stand at the same place.

Steps run different numbers of operators, so operators alone align nothing. The axis runs from 0 to
1. A phase that both steps have in the same order gets the mean of its shares of the two steps'
operators; one that only one of them has gets half of its share there. Within a phase operators are
spread evenly.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, groupby
from typing import NamedTuple

from dpprof.experiments.records.step_costs import Timeline
from dpprof.experiments.records.terms import Phase


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


def share_axis(a: Timeline, b: Timeline) -> SharedAxis:
    """Place two timelines on one axis.

    Args:
        a: The timeline of A's step.
        b: The timeline of B's step.

    Returns:
        Stretches from 0 to 1 without gaps, and both curves over them. A curve keeps every instant
        of its timeline, in order.
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
