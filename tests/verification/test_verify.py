"""Right methods pass and wrong ones do not, whatever it is that they get wrong."""

import math
from pathlib import Path

import pytest

from dpprof import catalogue
from dpprof.verdict import TOLERANCE, judge
from dpprof.verification.verify import ATTENTIONS, BATCH_SIZES, verify

PLUGIN = Path(__file__).parents[1] / "plugin"
OWN = catalogue.names("methods")
OTHERS = ("standard", "microbatch", "per-layer", "opacus-per-layer", "opacus-adaptive")
"""Those for which microbatch is no reference: other mechanisms, and itself."""


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    """Make another package's methods known to this process."""
    monkeypatch.syspath_prepend(PLUGIN)
    catalogue._entries.cache_clear()
    yield
    catalogue._entries.cache_clear()


def judged(method: str, model: str = "built-in"):
    cases = verify(model, method)
    assert [(one.attention, one.batch_size) for one in cases] == [
        (attention, batch) for attention in ATTENTIONS for batch in BATCH_SIZES
    ]
    return cases, *judge(cases)


PAIRS = [(method, "built-in") for method in OWN]
PAIRS += [(method, "test-scaled") for method in ("opacus-hooks", "opacus-ghost")]


@pytest.mark.parametrize(("method", "model"), PAIRS)
def test_our_own_methods_are_verified(method, model) -> None:
    cases, passed, reason = judged(method, model)

    assert (passed, reason) == (True, None)
    for one in cases:
        assert one.max_relative_error <= TOLERANCE
        assert one.references[-1] == "torch.func"
        assert ("microbatch" in one.references) == (method not in OTHERS)
        told = method not in ("standard", "microbatch")
        assert (one.max_relative_error_of_norms is not None) == told


def test_some_samples_are_clipped_and_some_are_not() -> None:
    clipped = {one.batch_size: one.norms_clipped for one in judged("microbatch")[0]}

    assert clipped[1] == 1
    assert 0 < clipped[4] < 4


def test_another_packages_right_method_passes() -> None:
    assert judged("test-right")[1:] == (True, None)


def test_groups_are_clipped_each_by_its_own_norm() -> None:
    cases, passed, _ = judged("test-right-by-parameter")

    assert passed
    for one in cases:
        assert one.groups > 20
        assert one.sensitivity == pytest.approx(1.0)
        assert 0 < one.norms_clipped < one.groups * one.batch_size
        assert one.references == ["torch.func"]  # microbatch clips all as one
        assert one.max_relative_error_of_norms <= TOLERANCE


WRONG = {
    "test-forgets-a-bias": "attention sdpa, B = 1: relative error of the gradient: ",
    "test-counts-twice": "attention sdpa, B = 4: relative error of the gradient: ",
    "test-remembers": "attention sdpa, B = 1: relative error of the gradient: 1.0e+00",
    "test-misstates-norms": "attention sdpa, B = 1: relative error of the norms: 5.0e-01",
    "test-leaves-one-out": "attention sdpa, B = 1: 1 of ",
    "test-clips-a-part": "attention sdpa, B = 1: its groups do not clip every trainable",
    "test-not-a-number": "attention sdpa, B = 1: the gradient found: not finite",
    "test-raises": "attention sdpa, B = 1: RuntimeError: a <script>",
}


@pytest.mark.parametrize("method", WRONG)
def test_what_is_wrong_is_caught_and_said(method) -> None:
    cases, passed, reason = judged(method)

    assert passed is False
    assert reason.startswith(WRONG[method])
    errors = [one.max_relative_error for one in cases]
    assert all(error is None or math.isfinite(error) for error in errors)


def test_a_method_that_refuses_some_cases_is_verified_for_the_others() -> None:
    cases, passed, reason = judged("test-only-sdpa")

    assert passed is True
    assert reason == "attention eager, B = 1: it knows no other attention"
    assert [one.outcome for one in cases] == ["passed"] * 2 + ["unsupported"] * 4


def test_a_method_that_refuses_everything_is_not_verified_and_did_not_fail() -> None:
    _, passed, reason = judged("test-refuses")

    assert passed is None
    assert reason.endswith("this method refuses every model")


def test_without_a_reference_nothing_is_known() -> None:
    cases, passed, reason = judged("opacus-hooks", "test-moody")

    assert passed is None
    assert "no reference: RuntimeError: not in the mood" in reason
    assert {one.outcome for one in cases} == {"unknown"}
