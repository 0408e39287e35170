"""A step's time from its operators': two timelines, and errors that belong together."""

import math

import pytest

from dpprof.predict.memory.exchanges import COMMUNICATION, COMPUTE, REPLICATION, Collective, Placed
from dpprof.predict.step_time.op_time import OpTime
from dpprof.predict.step_time.predict import Issued, combine


def ops(*seconds: float, kind: str = "gemm", spread: float = 0.1, basis="interpolated"):
    return [Issued(kind, OpTime(each, spread, basis)) for each in seconds]


@pytest.mark.parametrize(
    ("seconds", "host_s", "median_s"),
    [
        ((1.0, 2.0, 3.0), 0.1, 6.1),  # the first waits to be issued
        ((0.01,) * 100, 0.1, 10.01),
        ((1.0, 0.01, 0.01), 0.3, 0.3 + 1.0 + 0.02),  # the host runs ahead while the device works
        ((), 1.0, 0.0),
    ],
    ids=["large operators", "small operators", "a large one and small ones", "none"],
)
def test_a_step_takes_the_time_of_the_device_or_of_the_host(seconds, host_s, median_s) -> None:
    step = combine(ops(*seconds), host_s, host_spread=0.0, common_spread=0.0)

    assert step.median == pytest.approx(median_s)
    if seconds:
        assert step.waiting_share == pytest.approx(1 - sum(seconds) / median_s)
    else:
        assert (step.low, step.high, step.rests_on) == (0, 0, {})


def test_a_step_that_waits_for_the_host_is_as_uncertain_as_the_host() -> None:
    step = combine(ops(*[0.01] * 100), host_s=0.1, host_spread=0.2, common_spread=0.0)

    assert step.high == pytest.approx(10 * math.exp(1.645 * 0.2), rel=1e-2)


def test_errors_of_one_kind_add_up_and_of_two_kinds_do_not() -> None:
    alike = combine(ops(1.0, 1.0), 0.0, 0.0, 0.0)
    unlike = combine(ops(1.0) + ops(1.0, kind="copy"), 0.0, 0.0, 0.0)

    assert alike.high == pytest.approx(2 * math.exp(1.645 * 0.1))
    assert unlike.high == pytest.approx(2 * math.exp(1.645 * 0.1 / math.sqrt(2)))
    assert alike.low < unlike.low < 2.0 < unlike.high < alike.high


def test_what_a_step_rests_on_is_a_share_of_the_devices_time() -> None:
    step = combine(ops(3.0) + ops(1.0, basis="data sheet"), 0.0, 0.0, 0.0)

    assert step.rests_on == {"interpolated": 0.75, "data sheet": 0.25}


def test_all_of_a_device_may_be_slower() -> None:
    step = combine(ops(1.0, spread=0.03), 0.0, 0.0, common_spread=0.04)

    assert step.high == pytest.approx(math.exp(1.645 * 0.05))


def on(stream: int, seconds: float, *waits: int, collective=None) -> Issued:
    time = OpTime(seconds, 0.1, "interpolated")
    return Issued("other", time, Placed(stream, waits, collective))


SENT = Collective("all-gather", 1, 2)


def test_a_collective_beside_kernels_costs_what_it_outlasts_them_by() -> None:
    hidden = [on(COMMUNICATION, 2.0, collective=SENT), on(COMPUTE, 3.0), on(COMPUTE, 1.0, 0)]
    exposed = [on(COMMUNICATION, 5.0, collective=SENT), on(COMPUTE, 3.0), on(COMPUTE, 1.0, 0)]
    inline = [on(COMPUTE, 5.0, collective=SENT), on(COMPUTE, 3.0), on(COMPUTE, 1.0)]
    steps = [combine(one, 0.0, 0.0, 0.0) for one in (hidden, exposed, inline)]

    assert [one.median for one in steps] == [4.0, 6.0, 9.0]
    shares = [one.communication_share for one in steps]
    assert shares == pytest.approx([0.0, 2 / 6, 5 / 9])
    assert [one.waiting_share for one in steps] == pytest.approx([0.0, 0.0, 0.0])


@pytest.mark.parametrize("stream", [COMMUNICATION, REPLICATION])
def test_kernels_beside_a_collective_have_fewer_processors(stream) -> None:
    ops = [on(stream, 2.0, collective=SENT), on(COMPUTE, 3.0)]
    step = combine(ops, 0.0, 0.0, 0.0, lent=0.2)

    assert step.median == pytest.approx(3.0 + 2.0 * 0.2 / 0.8)


def test_collectives_at_once_take_no_more_processors_than_one() -> None:
    both = [on(one, 2.0, collective=SENT) for one in (COMMUNICATION, REPLICATION)]
    step = combine([*both, on(COMPUTE, 3.0)], 0.0, 0.0, 0.0, lent=0.2)

    assert step.median == pytest.approx(3.0 + 2.0 * 0.2 / 0.8)


def test_hidden_collectives_may_be_slow_without_harm() -> None:
    ops = [on(COMMUNICATION, 1.0, collective=SENT), on(COMPUTE, 3.0, 0)]
    hidden = [on(COMMUNICATION, 1.0, collective=SENT), on(COMPUTE, 3.0)]

    one, other = (combine(some, 0.0, 0.0, 0.0) for some in (ops, hidden))
    compute, ranks = (math.exp(1.645 * 0.1) - 1) * 3.0, math.exp(1.645 * 0.1) - 1
    assert one.high == pytest.approx(4.0 + math.hypot(compute, ranks))
    assert other.high == pytest.approx(3.0 + compute)
