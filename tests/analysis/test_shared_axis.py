"""Where the same phases of two steps stand, by hand."""

import pytest

from dpprof.experiments.records.step_costs import Timeline
from dpprof.results.analysis.difference.difference import share_axis


def timeline(*instants: tuple[int, str, int]) -> Timeline:
    """Make a timeline of instants: operators run, phase, live bytes."""
    ops, phases, sizes = zip(*instants, strict=True)
    halves = {"parameters": [1] * len(sizes), "noise": [size - 1 for size in sizes]}
    return Timeline(ops=list(ops), elapsed_s=None, phase=list(phases), components=halves)


# The last instant of the step before, as every timeline begins.
SHORT = timeline(
    (0, "step", 9), (0, "forward", 9), (2, "forward", 5), (4, "backward", 7), (8, "backward", 6)
)
LONG = timeline((0, "forward", 1), (60, "backward", 2), (70, "backward", 4), (80, "backward", 3))


def told(stretch) -> tuple:
    start, end = pytest.approx(stretch.start), pytest.approx(stretch.end)
    return stretch.phase, start, end, stretch.in_a, stretch.in_b


def test_a_phase_of_both_has_the_mean_of_its_shares() -> None:
    shared = share_axis(SHORT, LONG)

    # Forward is a half of one step and three quarters of the other.
    assert [told(one) for one in shared.stretches] == [
        ("forward", 0, 0.625, True, True),
        ("backward", 0.625, 1, True, True),
    ]
    assert shared.a.at == pytest.approx([0, 0, 0.3125, 0.625, 1])
    assert shared.b.at == pytest.approx([0, 0.625, 0.8125, 1])
    assert shared.a.total_bytes == [9, 9, 5, 7, 6]
    assert shared.b.total_bytes == [1, 2, 4, 3]


def test_a_phase_of_one_step_alone_stands_between_its_neighbours() -> None:
    other = timeline(
        (0, "forward", 1), (2, "backward", 2), (4, "second_backward", 8), (10, "step", 3)
    )
    plain = timeline((0, "forward", 1), (5, "backward", 2), (10, "step", 3), (10, "step", 3))
    shared = share_axis(other, plain)

    assert [told(one) for one in shared.stretches] == [
        ("forward", 0, 0.35, True, True),
        ("backward", 0.35, 0.7, True, True),
        ("second_backward", 0.7, 1, True, False),
    ]
    # The other step waits at the end of what both have.
    assert shared.b.at == pytest.approx([0, 0.35, 0.7, 0.7])


def test_phases_that_repeat_are_matched_in_order() -> None:
    microbatch = timeline(
        *((10 * i, "backward" if i % 2 else "forward", 1) for i in range(6)), (60, "step", 1)
    )
    shared = share_axis(SHORT, microbatch)
    both = [stretch.phase for stretch in shared.stretches if stretch.in_a and stretch.in_b]
    ends = [stretch.end for stretch in shared.stretches]

    assert both == ["forward", "backward"]
    assert len(shared.stretches) == 6
    assert [0.0, *ends[:-1]] == [stretch.start for stretch in shared.stretches]
    assert ends[-1] == pytest.approx(1)


def test_a_step_without_operators_has_no_stretches() -> None:
    empty = timeline((0, "step", 5))
    shared = share_axis(empty, empty)

    assert shared.stretches == []
    assert shared.a == ([0.0], [5])
    assert [one.phase for one in share_axis(empty, LONG).stretches] == ["forward", "backward"]
