"""A step's time from its operators': two timelines, and errors that belong together."""

import math

import pytest

from dpprof.step_time.op_time import OpTime
from dpprof.step_time.predict import combine


def ops(*seconds: float, kind: str = "gemm", spread: float = 0.1, basis="interpolated"):
    return [(kind, OpTime(each, spread, basis)) for each in seconds]


def test_large_operators_take_the_devices_time() -> None:
    step = combine(ops(1.0, 2.0, 3.0), host_s=0.1, host_spread=0.0, common_spread=0.0)

    assert step.median_s == pytest.approx(6.1)  # the first waits to be issued
    assert step.host_share == pytest.approx(0.1 / 6.1)


def test_small_operators_take_the_hosts_time() -> None:
    step = combine(ops(*[0.01] * 100), host_s=0.1, host_spread=0.2, common_spread=0.0)

    assert step.median_s == pytest.approx(10.01)
    assert step.host_share == pytest.approx(1 - 1 / 10.01)
    assert step.high_s == pytest.approx(10 * math.exp(1.645 * 0.2), rel=1e-2)


def test_the_host_runs_ahead_while_the_device_works() -> None:
    step = combine(ops(1.0, 0.01, 0.01), host_s=0.3, host_spread=0.0, common_spread=0.0)

    assert step.median_s == pytest.approx(0.3 + 1.0 + 0.02)


def test_errors_of_one_kind_add_up_and_of_two_kinds_do_not() -> None:
    alike = combine(ops(1.0, 1.0), 0.0, 0.0, 0.0)
    unlike = combine(ops(1.0) + ops(1.0, kind="copy"), 0.0, 0.0, 0.0)

    assert alike.high_s == pytest.approx(2 * math.exp(1.645 * 0.1))
    assert unlike.high_s == pytest.approx(2 * math.exp(1.645 * 0.1 / math.sqrt(2)))
    assert alike.low_s < unlike.low_s < 2.0 < unlike.high_s < alike.high_s


def test_what_a_step_rests_on_is_a_share_of_the_devices_time() -> None:
    step = combine(ops(3.0) + ops(1.0, basis="data sheet"), 0.0, 0.0, 0.0)

    assert step.rests_on == {"interpolated": 0.75, "data sheet": 0.25}


def test_all_of_a_device_may_be_slower() -> None:
    step = combine(ops(1.0, spread=0.03), 0.0, 0.0, common_spread=0.04)

    assert step.high_s == pytest.approx(math.exp(1.645 * 0.05))


def test_a_step_without_operators_takes_no_time() -> None:
    step = combine([], 1.0, 0.1, 0.1)

    assert (step.low_s, step.median_s, step.high_s, step.rests_on) == (0, 0, 0, {})
