"""Ratios of predicted times: what two steps share cancels out, what differs keeps its spread."""

import math

import pytest
from factory import make_capacity, make_experiment, make_memory, make_parts, write_synthetic

from dpprof.predict.step_time.gpu_model import HOST_S as HOST
from dpprof.results.analysis.advice import ratios
from dpprof.results.analysis.advice.ratios import (
    HOST_S,
    SPREADS,
    Ratio,
    accumulate,
    compare,
    compare_apart,
    find_spread,
    split,
)

Z_90 = 1.645
PLAIN = make_parts({"gemm": 6.0, "attention": 2.0}, {"optimizer": 1.0})
PRIVATE = make_parts({"gemm": 6.0, "attention": 2.0, "norm": 1.0}, {"optimizer": 1.0, "random": 1})
GRAMS = make_parts({"norm": 3.0})
PRODUCTS = make_parts({"gemm": 6.0})
WAITING = make_parts({"gemm": 1.0}, host=4.0, method="flash-bk", of_python=0.4)


def test_identical_kernels_have_a_ratio_of_exactly_one() -> None:
    assert compare(PRIVATE, PRIVATE._replace(method="per-layer")) == Ratio(1.0, 1.0, 1.0)


def test_disjoint_kernels_are_as_far_apart_as_independent_errors() -> None:
    ratio = compare(GRAMS, PRODUCTS)
    spreads = (SPREADS["norm"], PRODUCTS.of_products)
    run = 0.01
    each = [math.hypot(spread, PRODUCTS.own * spread, run) for spread in spreads]
    expected = compare_apart(0.5, *each)

    assert ratio.value == pytest.approx(0.5)
    assert (ratio.low, ratio.high) == pytest.approx((expected.low, expected.high), rel=1e-3)


def test_what_is_shared_is_taken_out() -> None:
    """Only a Gram kernel and noise differ: a tenth of the time each, of which an error is a few."""
    ratio = compare(PRIVATE, PLAIN)
    alone = compare_apart(11 / 9, PRIVATE.spread, PLAIN.spread)

    assert ratio.value == pytest.approx(11 / 9)
    assert alone.low < 1 < ratio.low
    assert ratio.high < alone.high


@pytest.mark.parametrize(("one", "other"), [(PRIVATE, PLAIN), (GRAMS, PRODUCTS), (WAITING, PLAIN)])
def test_a_ratio_is_one_over_its_reverse(one, other) -> None:
    ratio, reverse = compare(one, other), compare(other, one)

    assert [ratio.value, ratio.low, ratio.high] == pytest.approx(
        [1 / reverse.value, 1 / reverse.high, 1 / reverse.low]
    )


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_the_error_of_the_whole_device_does_not_matter(monkeypatch, spread) -> None:
    expected = compare(PRIVATE, PLAIN)
    monkeypatch.setattr(ratios, "_DEVICE", spread)

    assert compare(PRIVATE, PLAIN) == pytest.approx((*expected[:3], None))


def test_a_step_that_waits_for_python_is_as_unsure_as_python_is() -> None:
    ratio = compare(WAITING, PLAIN)

    assert math.log(ratio.high / ratio.value) > Z_90 * math.hypot(0.35, 0.4)
    assert compare(WAITING, WAITING._replace(method="other")).high == 1.0


def test_steps_on_two_devices_share_no_error() -> None:
    ratio = compare(PRIVATE, PLAIN._replace(device="h200", spread=0.2))

    assert ratio == compare_apart(PRIVATE.seconds / PLAIN.seconds, 0.1, 0.2)
    assert math.log(ratio.high / ratio.value) == pytest.approx(Z_90 * math.hypot(0.1, 0.2))
    assert find_spread(ratio.low, ratio.high) == pytest.approx(math.hypot(0.1, 0.2))


def test_an_update_counts_less_where_gradients_add_up() -> None:
    """The update is a ninth of the time, and of four batches a thirty-third."""
    four = accumulate(PLAIN, 4)

    assert (four.each, four.seconds) == (PLAIN.each, pytest.approx(8.25))
    assert compare(four, PLAIN).value == pytest.approx(8.25 / 9)


def test_the_host_takes_as_long_as_step_times_are_predicted_with() -> None:
    assert HOST.value == HOST_S


@pytest.mark.parametrize(("step_s", "is_known"), [(1.0, True), (None, False)])
def test_a_result_is_split_into_seconds_that_add_up(tmp_path, step_s, is_known) -> None:
    recorded = {**make_memory({"parameters": 8}), **make_capacity(step_s)}
    experiment = make_experiment(method="flash", device="cuda", target="h100")
    result = write_synthetic(tmp_path, experiment, instrument="capacity", recorded=recorded)
    parts = split(result)

    assert (parts is not None) == is_known
    if parts is None:
        unknown = compare(parts, PLAIN, "no time is predicted of flash")
        assert unknown == Ratio(None, None, None, "no time is predicted of flash")
        assert not unknown.holds_one
        return
    tokens = 8 * 4
    kernels = {**parts.each.kernels, **parts.update.kernels}
    assert {kind for _, kind in kernels} == {"gemm", "optimizer"}
    assert math.fsum(kernels.values()) == pytest.approx(1.0 / tokens)
    assert (parts.seconds, parts.update.seconds) == pytest.approx((1 / tokens, 0.2 / tokens))
    assert parts.each.host == pytest.approx(HOST_S / tokens)
    assert parts.spread == pytest.approx(math.log(1.1) / Z_90)


def test_a_target_that_is_not_known_here_is_split_too(tmp_path, monkeypatch) -> None:
    """Results may come from a machine with a package that has the target."""
    recorded = {**make_memory({"parameters": 8}), **make_capacity(1.0)}
    experiment = make_experiment(method="flash", device="cuda", target="h100")
    result = write_synthetic(tmp_path, experiment, instrument="capacity", recorded=recorded)
    monkeypatch.setattr(ratios.registry, "names", lambda _: ["t4"])
    parts = split(result)

    assert parts.device == "1 x h100, float32"
    assert parts.seconds == pytest.approx(1.0 / (8 * 4))
