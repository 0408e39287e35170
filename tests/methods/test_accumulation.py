"""Steps of several batches: what they allocate, what they compute, and which are refused."""

import pytest
import torch
from factory import make_experiment
from memory_steps import MODEL, record_and_estimate
from snapshots import assert_sentences, refusals_of

from dpprof.measure.instruments.memory import measure
from dpprof.predict.estimate import estimate
from dpprof.subjects.setup import import_method, set_up


def ask(method: str, **fields):
    usual = {"model": MODEL, "method": method, "batch_size": 2, "seq_len": 8}
    return make_experiment(**usual | {"noise_multiplier": 0.0} | fields)


@pytest.mark.parametrize(
    ("method", "accumulation"),
    [
        ("standard", 5),
        ("flash-bk", 4),
        *(
            pytest.param(method, accumulation, marks=pytest.mark.slow)
            for method in ("standard", "flash-bk", "flash", "per-layer", "opacus-hooks")
            for accumulation in (2, 3, 6)
        ),
    ],
)
def test_an_estimate_of_three_batches_is_what_all_of_them_take(method, accumulation) -> None:
    real, fake = record_and_estimate(ask(method, accumulation=accumulation))

    assert fake.compute.flops_by_phase == real.compute.flops_by_phase
    assert fake.io.by_phase == real.io.by_phase
    assert fake.compute.model_flops == real.compute.model_flops
    assert ("accumulation" in fake.memory.assumed) is (accumulation > 3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["opacus-ghost", "opacus-fast-gradient-clipping"])
@pytest.mark.parametrize("accumulation", [2, 5])
def test_an_estimate_of_two_passes_is_what_all_batches_take(method, accumulation) -> None:
    """But for the name of the operator by which Opacus copies the first batch's sum."""
    experiment = ask(method, accumulation=accumulation)
    real, fake = (run(experiment, lambda _: None) for run in (measure, estimate))

    for name in ("peak_allocated_bytes", "first_step_peak_allocated_bytes"):
        assert getattr(fake.memory, name) == getattr(real.memory, name)
    assert fake.memory.at_peak.components == real.memory.at_peak.components
    assert fake.compute.flops_by_phase == real.compute.flops_by_phase


@pytest.mark.parametrize("method", ["standard", "flash-bk", "opacus-hooks", "opacus-ghost"])
def test_the_same_samples_three_times_have_the_gradient_of_a_batch(method) -> None:
    def gradients(accumulation: int) -> list[torch.Tensor]:
        experiment = ask(method, accumulation=accumulation)
        kind = import_method(experiment)
        step, batch, _ = set_up(experiment, kind, torch.device("cpu"), lambda *_: None)
        step.compute_gradient(batch, lambda _: None)
        return [parameter.grad for parameter in step.module.parameters()]

    for several, single in zip(gradients(3), gradients(1), strict=True):
        torch.testing.assert_close(several, single)


def test_a_method_says_which_steps_it_does_not_take() -> None:
    asked = {"method": "opacus-ghost", "accumulation": 4}
    refuse = refusals_of(lambda **fields: estimate(ask(**asked | fields), lambda _: None))
    assert_sentences("methods/accumulation", refuse)
