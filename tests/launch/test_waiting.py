"""A wait has an end, is told ever more seldom, and is bounded by an option or a variable."""

import math
from types import SimpleNamespace

import pytest

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.launch import device_lock
from dpprof.experiments.launch.device_lock import MAX_WAIT, longest_wait_s, wait_for


@pytest.fixture
def clock(monkeypatch):
    """A clock that sleeping alone moves."""
    now = SimpleNamespace(s=0.0)

    def sleep(seconds: float) -> None:
        now.s += seconds

    monkeypatch.setattr(device_lock, "time", SimpleNamespace(monotonic=lambda: now.s, sleep=sleep))
    return now


def never(_: float) -> None:
    raise AssertionError("told of a wait that there was not")


@pytest.mark.parametrize("looks", [[7], [None, 7]])
def test_what_is_there_at_the_second_look_is_found_without_a_word(clock, looks) -> None:
    seen = iter(looks)

    assert wait_for(lambda: next(seen), never, longest_s=math.inf, every_s=1.0) == 7
    assert clock.s == len(looks) - 1


def test_a_wait_ends_exactly_at_its_bound(clock) -> None:
    told: list[float] = []

    assert wait_for(lambda: None, told.append, longest_s=2.5, every_s=1.0) is None
    assert (clock.s, told) == (2.5, [1.0])


def test_a_night_is_told_at_growing_intervals_and_then_every_hour(clock) -> None:
    told: list[float] = []
    wait_for(lambda: None, told.append, longest_s=4 * 3600.0, every_s=1.0)

    first, *later = told
    assert first == 1.0
    assert [seconds / 60 for seconds in later] == [1, 2, 4, 8, 16, 32, 64, 124, 184]


@pytest.mark.parametrize(
    ("stated", "variables", "seconds"),
    [
        (None, {}, math.inf),
        (None, {MAX_WAIT: ""}, math.inf),
        (None, {MAX_WAIT: "90.5"}, 90.5),
        ("0", {MAX_WAIT: "90"}, 0.0),
        (None, {"SLURM_JOB_ID": "12"}, 600.0),
        (None, {"SLURM_JOB_ID": "12", MAX_WAIT: "7"}, 7.0),
    ],
)
def test_the_option_comes_before_the_variable_and_both_before_the_scheduler(
    monkeypatch, stated, variables, seconds
) -> None:
    for name in (MAX_WAIT, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert longest_wait_s(stated) == seconds


@pytest.mark.parametrize("bad", ["-1", "soon", "nan", "inf", "1e3", "1" * 20, "٣", "1\n"])
def test_what_is_no_number_of_seconds_is_refused_by_name(monkeypatch, bad) -> None:
    with pytest.raises(InputError, match=r"--max-wait-s: .* is not allowed; it must be a number"):
        longest_wait_s(bad)
    monkeypatch.setenv(MAX_WAIT, bad)
    with pytest.raises(InputError, match=f"{MAX_WAIT}: .* is not allowed; it must be a number"):
        longest_wait_s()
