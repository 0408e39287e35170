"""Every private method computes the gradient that microbatch defines."""

import functools

import pytest
import torch
from products import one_in
from snapshots import assert_sentences, refusals_of
from steps import gradient, norms_of, prepare, sample_gradients
from torch import Tensor

from dpprof.experiments.config import registry
from dpprof.private.engine.factor import clip_factor

PER_SAMPLE = ["opacus-ew", "opacus-functorch", "opacus-hooks"]
TWO_PASS = ["opacus-fast-gradient-clipping", "opacus-ghost"]
OPACUS = PER_SAMPLE + TWO_PASS
PRIVATE = [*OPACUS, "flash", "flash-bk"]
OTHERS = ["opacus-adaptive", "opacus-per-layer", "per-layer"]
"""Other mechanisms, each held to its own definition in a file of its own."""

SHAPES = [  # vocab_size, d_model, layers, heads, seq_len
    (16, 8, 1, 2, 4),
    (50, 16, 2, 4, 9),
    (11, 12, 1, 3, 1),
    (7, 8, 1, 1, 40),
]
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
ATTENTIONS = ["sdpa", "eager", "opacus"]
CASES = [
    *one_in(6, PRIVATE, SHAPES, ATTENTIONS, [1, 7], ["float64"]),
    *((method, SHAPES[0], "sdpa", 7, "float32") for method in PRIVATE),
    *(
        pytest.param(method, SHAPES[0], "sdpa", 1, "float32", marks=pytest.mark.slow)
        for method in PRIVATE
    ),
]


@functools.cache
def clipped_by_microbatch(shape, attention, batch_size, dtype) -> tuple[dict, Tensor]:
    """An experiment of which microbatch clips some samples, and the gradient that it finds."""
    V, D, L, H, T = shape
    fields = {
        "model": {"vocab_size": V, "d_model": D, "layers": L, "heads": H},
        "seq_len": T,
        "batch_size": batch_size,
        "dtype": dtype,
        "attention": attention,
        "noise_multiplier": 0,
    }
    # The bound lies between the samples' norms, so that some are clipped and one is not.
    norms = norms_of(sample_gradients(**fields | {"dtype": "float64"})).sort().values
    bound = float((norms[0] + norms[-1]) / 2) if batch_size > 1 else float(norms[0]) / 2
    assert batch_size == 1 or norms[0] < bound < norms[-1]
    fields["max_grad_norm"] = bound
    return fields, gradient("microbatch", **fields)


@pytest.mark.parametrize(("method", "shape", "attention", "batch_size", "dtype"), CASES)
def test_clipped_gradient_equals_microbatch(method, shape, attention, batch_size, dtype) -> None:
    fields, expected = clipped_by_microbatch(shape, attention, batch_size, dtype)
    found = gradient(method, **fields)

    error = (found - expected).norm() / expected.norm()
    assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("method", sorted(set(PRIVATE) - {"opacus-ew"}))
def test_autocast_gradient_is_microbatchs_to_bfloat16s_precision(method) -> None:
    fields = {"batch_size": 5, "noise_multiplier": 0, "dtype": "bfloat16"}

    expected, found = gradient("microbatch", **fields), gradient(method, **fields)

    # bfloat16 keeps 8 bits, so about 0.4 % a rounding.
    assert found.dtype == torch.float32
    assert (found - expected).norm() / expected.norm() < 0.03


def test_autocast_is_refused_in_one_sentence() -> None:
    assert_sentences("methods/autocast", refusals_of(functools.partial(prepare, dtype="bfloat16")))


@pytest.mark.parametrize("bound", [1e-3, 1e3])
def test_microbatch_equals_an_independent_computation(bound: float) -> None:
    fields = {"batch_size": 5, "dtype": "float64", "noise_multiplier": 0}
    step, batch = prepare("standard", **fields)
    expected = 0.0
    for tokens, labels in zip(*batch, strict=True):
        step.module.zero_grad()
        torch.nn.functional.cross_entropy(step.module(tokens[None])[0], labels).backward()
        flat = torch.cat([p.grad.flatten() for p in step.module.parameters()])
        expected = expected + flat * min(1.0, bound / (float(flat.norm()) + 1e-6)) / 5

    found = gradient("microbatch", max_grad_norm=bound, **fields)

    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_without_clipping_and_noise_private_is_the_standard_gradient() -> None:
    fields = {"batch_size": 3, "dtype": "float64", "noise_multiplier": 0, "max_grad_norm": 1e6}

    standard = gradient("standard", **fields)
    for method in ["microbatch", *PRIVATE]:
        torch.testing.assert_close(gradient(method, **fields), standard, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["microbatch", "per-layer", "opacus-per-layer", *PRIVATE])
def test_noise_has_the_standard_deviation_that_was_asked_for(method) -> None:
    fields = {
        "batch_size": 4,
        "max_grad_norm": 0.5,
        "model": {"vocab_size": 200, "d_model": 32, "layers": 1, "heads": 2},
    }

    noise = gradient(method, noise_multiplier=3.0, **fields) - gradient(
        method, noise_multiplier=0.0, **fields
    )

    # sigma C / B, from about 26,000 values: one standard error is 0.4 %.
    assert noise.std().item() == pytest.approx(3.0 * 0.5 / 4, rel=0.03)
    assert abs(noise.mean().item()) < 0.01


@pytest.mark.parametrize("method", ["microbatch", "per-layer", *PRIVATE])
def test_an_experiment_draws_the_same_noise_again(method) -> None:
    assert torch.equal(*(gradient(method, noise_multiplier=3.0) for _ in range(2)))


@pytest.mark.parametrize("method", [*OPACUS, "opacus-per-layer"])
def test_the_step_taken_apart_is_opacus_own_step(method) -> None:
    fields = {"batch_size": 4, "dtype": "float64", "max_grad_norm": 0.1}
    apart, batch = prepare(method, **fields)
    whole, _ = prepare(method, **fields)

    torch.manual_seed(1)
    apart.run(batch, lambda _: None)

    torch.manual_seed(1)
    logits = whole.module(batch.x)
    labels = batch.labels.flatten()
    if method in TWO_PASS:
        whole.module.enter = lambda _: None
        loss = whole.criterion(logits.flatten(0, 1), labels, shape=logits.shape)
    else:
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)
    loss.backward()
    whole.optimizer.step()

    for one, other in zip(apart.module.parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


PHASES = {
    "standard": ["forward", "backward", "step"],
    "microbatch": ["forward", "backward", "clip"] * 2 + ["noise", "step"],
    **{
        name: ["forward", "backward", "clip", "noise", "step"]
        for name in [*PER_SAMPLE, "opacus-per-layer"]
    },
    **{
        name: ["forward", "backward", "clip", "second_backward", "noise", "step"]
        for name in [*TWO_PASS, "opacus-adaptive", "flash"]
    },
    "flash-bk": ["forward", "backward", "clip", "noise", "step"],
    "per-layer": ["forward", "backward", "noise", "step"],
}


@pytest.mark.parametrize("method", sorted(PHASES))
def test_phases_are_told_in_order(method) -> None:
    step, batch = prepare(method, batch_size=2, noise_multiplier=0.1)
    told: list[str] = []
    for _ in range(2):
        told.clear()
        step.run(batch, told.append)
        assert told == PHASES[method]


@pytest.mark.parametrize(
    ("method", "optimizer"), one_in(2, sorted(PHASES), [torch.optim.SGD, torch.optim.AdamW])
)
def test_steps_change_parameters_and_leave_nothing_for_the_next(method, optimizer) -> None:
    step, batch = prepare(method, batch_size=2, noise_multiplier=0.1)
    step.attach_optimizer(optimizer(step.module.parameters(), lr=0.1))
    before = [p.detach().clone() for p in step.module.parameters()]
    step.run(batch, lambda _: None)

    assert all(
        not torch.equal(old, new) for old, new in zip(before, step.module.parameters(), strict=True)
    )
    for parameter in step.module.parameters():
        assert getattr(parameter, "grad_sample", None) is None
        assert parameter.grad is None or not parameter.grad.any()


def test_every_method_is_tested_here() -> None:
    assert set(registry.names("methods")) == set(PHASES)
    assert set(PHASES) == {"standard", "microbatch", *PRIVATE, *OTHERS}


def test_clip_factor_known_values() -> None:
    norms = torch.tensor([0.0, 0.5, 2.0, 1e9], dtype=torch.float64)

    expected = torch.tensor([1.0, 1.0, 1 / 2.000001, 1e-9], dtype=torch.float64)
    torch.testing.assert_close(clip_factor(norms, 1.0), expected, rtol=1e-9, atol=0)
