"""What private training costs on a GPU, predicted: the figures that users choose by."""

import pytest
from factory import make_experiment

from dpprof.flops.cost import COUNTED
from dpprof.instruments import memory


@pytest.fixture
def estimated(monkeypatch):
    """Estimate a step; returns the measurement and the step's operators."""
    steps = []
    state_compute = memory.state_compute

    def note(experiment, module, step, ceilings):
        steps.append(step)
        return state_compute(experiment, module, step, ceilings)

    monkeypatch.setattr(memory, "state_compute", note)

    def estimate(**given):
        return memory.estimate(make_experiment(**given), lambda _phase: None), steps.pop().ops

    return estimate


def count_products(ops, dtype: str | None = None) -> int:
    counted = (op.cost for op in ops if op.cost.family in COUNTED)
    return sum(cost.flops for cost in counted if dtype in (None, cost.dtype))


@pytest.mark.slow
def test_book_keeping_of_a_billion_parameters_costs_hardly_more_than_plain_training(
    estimated,
) -> None:
    given = {
        "model": "1b",
        "batch_size": 4,
        "seq_len": 2_048,
        "dtype": "bfloat16",
        "target": "h100",
        "device": "cuda",
    }
    plain, _ = estimated(method="standard", **given)
    private, ops = estimated(method="flash-bk", **given)

    peak = private.memory.peak_allocated_bytes / plain.memory.peak_allocated_bytes
    roofline = private.compute.roofline_step_s / plain.compute.roofline_step_s
    assert peak <= 1.02
    assert roofline <= 1.25
    assert len(ops) <= 6_000
    assert count_products(ops, "float32") <= 0.05 * count_products(ops)
