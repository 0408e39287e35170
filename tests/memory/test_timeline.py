"""Timelines against answers that can be worked out by hand, real and under fake tensors."""

import pytest
from memory_steps import MODEL, B, D, P, T, V, at_end_of, at_peak, keep, keep_once

from dpprof.experiments.config import registry
from dpprof.experiments.records.terms import COMPONENTS

SUMS = B * 4
"""The norms themselves come out of a product too, as samples x 1 x 1."""

TENSORS = 2 + 2 * 12 + 2 + 1
METHODS = registry.names("methods")
HOOKS = ["opacus-hooks", "opacus-functorch", "opacus-ew", "opacus-per-layer"]
TWO_PASS = ["opacus-ghost", "opacus-fast-gradient-clipping", "opacus-adaptive"]


@pytest.mark.parametrize(
    "method",
    [
        method
        if method in ("standard", "flash-bk", "opacus-hooks", "opacus-ghost")
        else pytest.param(method, marks=pytest.mark.slow)
        for method in METHODS
    ],
)
def test_a_steady_step_sums_to_its_peak_and_hardly_anything_is_guessed(method) -> None:
    step = keep_once(method)
    peak = at_peak(step)

    assert sum(peak.values()) == step.peak_bytes
    assert peak["unattributed"] < 0.001 * step.peak_bytes
    assert peak["parameters"] == P * 4
    assert peak["optimizer_state"] == 2 * P * 4 + TENSORS * 4
    assert peak["inputs"] == 2 * B * T * 8
    assert step.totals[0] == step.totals[-1]
    live = step.live_at_peak
    guessed = sum(one.storage.nbytes for one in live if one.owner.evidence == "phase")
    assert guessed <= 0.1 * sum(one.storage.nbytes for one in live)


@pytest.mark.parametrize("method", HOOKS)
def test_per_sample_gradients_are_a_gradient_for_each_sample(method) -> None:
    step = keep_once(method)

    assert at_end_of(step, "backward")["per_sample_gradients"] == B * P * 4
    assert at_end_of(step, "clip")["summed_gradients"] == P * 4


def test_microbatch_sums_beside_the_gradient_at_hand() -> None:
    step = keep_once("microbatch")

    assert at_peak(step)["summed_gradients"] == at_end_of(step, "backward")["gradients"] == P * 4


@pytest.mark.parametrize("method", TWO_PASS)
def test_norms_are_a_number_a_sample_for_each_parameter_and_for_all(method) -> None:
    step = keep_once(method)

    assert at_end_of(step, "clip")["norm_samples"] == B * (TENSORS + 1) * 4
    assert at_end_of(step, "noise")["summed_gradients"] == P * 4
    assert at_end_of(step, "noise")["gradients"] == P * 4


def test_ghost_holds_two_gram_matrices_at_its_peak() -> None:
    """The peak is in the head, which has no bias; a bias has Opacus make a third one."""
    step = keep("opacus-ghost", model=MODEL | {"vocab_size": 400})
    grams = step.balances[:, COMPONENTS.index("gram_matrices")]

    assert step.peak_storage.module == "head"
    assert at_peak(step)["gram_matrices"] == 2 * B * T * T * 4 + SUMS
    assert grams.max() == 3 * B * T * T * 4


def test_noise_is_drawn_one_parameter_at_a_time() -> None:
    largest = max(V * D, 4 * D * D) * 4
    for method in (*HOOKS, *TWO_PASS, "microbatch"):
        noise = keep_once(method).balances[:, COMPONENTS.index("noise")].max()
        assert largest <= noise < 3 * largest, method


def test_what_autograd_and_a_hook_both_hold_counts_once() -> None:
    """Inputs of layers are saved by autograd; those that only a hook needs are its own."""
    plain, hooked = keep_once("standard"), keep_once("opacus-hooks")
    of_plain = at_end_of(plain, "forward")
    of_hooked = at_end_of(hooked, "forward")

    # Position ids are looked up by hook and autograd; autograd keeps no float input of a
    # frozen-input embedding, and the hook detaches what it keeps from the same storage.
    assert (
        of_hooked["dp_activations"]
        == of_plain["saved_activations"] - (of_hooked["saved_activations"])
    )
