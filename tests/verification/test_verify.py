"""Right methods pass and wrong ones do not, whatever it is that they get wrong."""

import functools
import math
from pathlib import Path

import pytest

from dpprof.experiments.config import registry
from dpprof.experiments.config.mechanisms import FLAT, NO_CLIPPING
from dpprof.experiments.records.verdict import (
    GRADIENT_SCENARIOS,
    HOLES,
    TOLERANCE,
    judge,
    judged,
    name_holes,
)
from dpprof.measure.verification import verify as verify_module
from dpprof.measure.verification.verify import ATTENTIONS, BATCH_SIZES, verify_case
from dpprof.private.substitutes import substitute

PLUGIN = Path(__file__).parents[1] / "plugin"
OWN = registry.names("methods")
OTHERS = ("standard", "microbatch", "per-layer", "opacus-per-layer", "opacus-adaptive")
"""Those for which microbatch is no reference: other mechanisms, and itself."""


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    """Make another package's methods known to this process."""
    monkeypatch.syspath_prepend(PLUGIN)
    registry._entries.cache_clear()
    yield
    registry._entries.cache_clear()


ONE = ("sdpa",)
"""The attention with which methods are tried by default here."""


@functools.cache
def verify_once(method: str, model: str, attentions: tuple[str, ...]):
    with substitute(verify_module, "ATTENTIONS", attentions):
        return verify_module.verify(model, method)


def found(method: str, model: str = "built-in", attentions: tuple[str, ...] = ONE):
    return verify_once(method, model, attentions)


def verdict(method: str, model: str = "built-in", attentions: tuple[str, ...] = ONE):
    """The cases of which the verdict consists, and what they amount to."""
    cases = judged(found(method, model, attentions).cases)
    assert [(one.attention, one.batch_size, one.scenario) for one in cases] == [
        *((attention, batch, "plain") for attention in attentions for batch in BATCH_SIZES),
        *(("sdpa", 4, scenario) for scenario in ("ignored labels", "frozen")),
    ]
    return cases, *judge(cases)


PAIRS = [(method, "built-in") for method in OWN]
PAIRS += [(method, "test-scaled") for method in ("opacus-hooks", "opacus-ghost")]


MECHANISMS = {
    "standard": NO_CLIPPING,
    "per-layer": "per-layer clipping",
    "opacus-per-layer": "per-parameter clipping",
    "opacus-adaptive": "adaptive flat clipping",
}


@pytest.mark.parametrize("attentions", [ONE, pytest.param(ATTENTIONS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "model"), PAIRS)
def test_our_own_methods_are_verified(method, model, attentions) -> None:
    cases, passed, reason = verdict(method, model, attentions)

    assert (passed, reason) == (True, None)
    assert found(method, model, attentions).mechanism == MECHANISMS.get(method, FLAT)
    for one in cases:
        assert one.max_relative_error <= TOLERANCE
        assert one.references[-1] == "torch.func"
        assert ("microbatch" in one.references) == (method not in OTHERS)
        told = method not in ("standard", "microbatch")
        assert (one.max_relative_error_of_norms is not None) == told


def test_some_samples_are_clipped_and_some_are_not() -> None:
    clipped = {one.batch_size: one.norms_clipped for one in verdict("microbatch")[0]}

    assert clipped[1] == 1
    assert 0 < clipped[4] < 4


def test_groups_are_clipped_each_by_its_own_norm() -> None:
    cases, passed, _ = verdict("test-right-by-parameter")

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
    "test-counts-padding": "attention sdpa, B = 4, ignored labels: relative error of the gradient",
    "test-freezes-the-rest": "attention sdpa, B = 4, frozen: relative error of the gradient: ",
    "test-says-flat": "attention sdpa, B = 1: it declares flat clipping, and clips 29 groups",
    "test-each-to-c": "attention sdpa, B = 1: one sample can move the sum by 5.39 C, and it decl",
    "test-each-to-c-silently": (
        "attention sdpa, B = 1: it declares a sensitivity of 100, which takes a mechanism of "
        "another name and a docstring that states the sensitivity"
    ),
    "test-flat-with-a-sensitivity": "attention sdpa, B = 1: it declares a sensitivity of 2, which",
    "test-says-it-clips": "attention sdpa, B = 1: it declares flat clipping, and clips nothing",
    "test-says-it-does-not": "attention sdpa, B = 1: it clips, and declares no mechanism",
    "test-moves-the-noise": "attention sdpa, B = 1: one sample can move the sum by 2.00 C",
}


@pytest.mark.parametrize("method", WRONG)
def test_what_is_wrong_is_caught_and_said(method) -> None:
    cases, passed, reason = verdict(method)

    assert passed is False
    assert reason.startswith(WRONG[method])
    errors = [one.max_relative_error for one in cases]
    assert all(error is None or math.isfinite(error) for error in errors)


def test_more_than_c_passes_under_another_name_with_a_word_on_it() -> None:
    cases, passed, _ = verdict("test-each-to-c-told")

    assert passed
    assert found("test-each-to-c-told").mechanism == "clipping by parameter"
    assert cases[0].sensitivity == pytest.approx(29**0.5)


HOLED = {
    "test-passes-on": "a layer thawed after set-up: the gradient is not the reference's",
    "test-lets-through": "one non-finite sample: the gradient is not finite",
    "test-re-adds": "gradients that were not cleared: the gradient is neither the last nor the sum",
    "test-updates-frozen": "parameters frozen after set-up: the frozen parameters changed",
    "test-waits-for-noise": "an empty batch: 29 of 29 parameters have no gradient",
}


@pytest.mark.parametrize("method", HOLED)
def test_a_lost_guarantee_is_a_hole_and_no_failure(method) -> None:
    assert verdict(method)[1:] == (True, None)
    assert name_holes(found(method).cases) == [HOLED[method]]


def test_what_is_refused_is_no_hole() -> None:
    cases = found("test-refuses-all").cases
    refused = {one.scenario: one.reason for one in cases if one.scenario in HOLES}

    assert verdict("test-refuses-all")[1:] == (True, None)
    assert name_holes(cases) == []
    assert refused == {
        "frozen later": "RuntimeError: parameters were frozen or thawed",
        "thawed later": "RuntimeError: parameters were frozen or thawed",
        "non-finite": "RuntimeError: a sample is not finite",
        "empty": "RuntimeError: there are no samples",
        "accumulated": "RuntimeError: gradients were not cleared",
    }


def test_opacuss_holes_are_told_and_its_refusals_are_none() -> None:
    cases = found("opacus-ghost").cases

    assert name_holes(cases) == [
        "a layer thawed after set-up: the gradient is not the reference's",
        "one non-finite sample: the gradient is not finite",
    ]
    (accumulated,) = [one for one in cases if one.scenario == "accumulated"]
    assert accumulated.outcome == "passed"


@pytest.mark.parametrize("method", ["flash", "flash-bk", "per-layer", "microbatch"])
def test_our_own_private_methods_have_no_holes(method) -> None:
    """Of every guarantee scenario our own methods are right, or refuse it."""
    cases = {one.scenario: one for one in found(method).cases if one.scenario in HOLES}

    assert list(cases) == list(HOLES)
    assert {one.outcome for one in cases.values()} <= {"passed", "unsupported"}
    assert name_holes(found(method).cases) == []


def test_another_packages_right_method_passes_in_every_scenario() -> None:
    assert verdict("test-right")[1:] == (True, None)
    cases = found("test-right").cases

    assert {one.outcome for one in cases} == {"passed"}
    assert {one.scenario for one in cases} == {*GRADIENT_SCENARIOS, *HOLES} - {"other padding"}


@pytest.mark.parametrize("method", ["standard", "test-forgets-a-bias"])
def test_a_guarantee_is_tried_only_where_there_is_one(method) -> None:
    tried = [one.outcome for one in found(method).cases if one.scenario in HOLES]

    assert tried == {"standard": [], "test-forgets-a-bias": ["unknown"] * 5}[method]


def test_what_a_model_does_not_allow_is_not_tried() -> None:
    """Its one table is its head, too: where a row is infinite no sample is finite."""
    by = {one.scenario: one for one in found("microbatch", "test-tied").cases}

    assert by["non-finite"].outcome == by["frozen"].outcome == "unsupported"
    assert by["non-finite"].reason == "no single sample of this model can be made non-finite"
    assert by["frozen"].reason == "the model has only one parameter, which cannot be frozen"
    assert judge(list(by.values()))[0] is True


def test_a_method_that_refuses_some_cases_is_verified_for_the_others() -> None:
    cases, passed, reason = verdict("test-only-sdpa", attentions=ATTENTIONS)

    assert passed is True
    assert reason == "attention eager, B = 1: it knows no other attention"
    assert [one.outcome for one in cases] == ["passed"] * 2 + ["unsupported"] * 4 + ["passed"] * 2


def test_a_method_that_refuses_everything_is_not_verified_and_did_not_fail() -> None:
    _, passed, reason = verdict("test-refuses")

    assert passed is None
    assert reason.endswith("this method refuses every model")


def test_text_that_cannot_be_encoded_is_spelled_in_the_reason() -> None:
    case = verify_case("test-linear", "test-half-a-character", "sdpa", 1)

    assert (case.outcome, case.reason) == ("failed", "RuntimeError: half a \\ud800 character")


def test_without_a_reference_nothing_is_known() -> None:
    cases, passed, reason = verdict("opacus-hooks", "test-moody")

    assert passed is None
    assert "no reference: RuntimeError: not in the mood" in reason
    assert {one.outcome for one in cases} == {"unknown"}
