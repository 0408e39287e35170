"""The harness pairs what it should, and the bare loop does what it is compared with."""

import re
from pathlib import Path

import pytest
import torch
from factory import make_experiment

import bare_loop
from dpprof.experiments.config import registry
from dpprof.subjects.setup import set_up
from interleave import Comparison, measure

SIZE = {"vocab_size": 16, "d_model": 8, "layers": 2, "heads": 2}


@pytest.mark.parametrize("method", bare_loop.METHODS)
def test_the_bare_loop_trains_to_the_same_parameters(method) -> None:
    experiment = make_experiment(method=method, model=SIZE, batch_size=3, noise_multiplier=0)
    training = set_up(
        experiment, registry.load("methods", method), torch.device("cpu"), lambda *_: None
    )
    model = bare_loop.LanguageModel(*SIZE.values(), experiment.seq_len)
    with torch.no_grad():
        for bare, own in zip(model.parameters(), training.step.module.parameters(), strict=True):
            bare.copy_(own)
    step = bare_loop.make_step(model, method, *training.batch, noise_multiplier=0.0)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        step()
        training.step.run(training.batch, lambda _: None)

    for before, bare, own in zip(
        start, model.parameters(), training.step.module.parameters(), strict=True
    ):
        assert not torch.equal(before, bare)
        torch.testing.assert_close(bare, own, rtol=1e-4, atol=1e-6)


def test_the_bare_loop_knows_nothing_of_dpprof() -> None:
    source = Path(bare_loop.__file__).read_text(encoding="utf-8")
    assert re.findall(r"^\s*(?:from|import) dpprof", source, re.MULTILINE) == []


def test_sides_alternate() -> None:
    order = []
    sides = (lambda: order.append("a") or 3.0, lambda: order.append("b") or 2.0)
    pairs = measure("a / b", *sides, pairs=10)

    assert order == ["a", "b"] * 10
    assert (pairs.ratio, pairs.interval) == (1.5, (1.5, 1.5))


def test_drift_that_hits_both_sides_leaves_the_ratio_alone() -> None:
    drift = [1.0 + 0.5 * pair for pair in range(12)]
    pairs = Comparison("a / b", [(1.1 * d, d) for d in drift])

    assert pairs.ratio == pytest.approx(1.1)
    assert pairs.interval == pytest.approx((1.1, 1.1))


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs: 9 is not allowed; it must be at least 10"):
        measure("a / b", lambda: 1.0, lambda: 1.0, pairs=9)
