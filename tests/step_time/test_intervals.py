"""An interval is widened for what differs between sources, and more where nobody measured."""

import math

import pytest
from factory import make_experiment

from dpprof.experiments.config import registry
from dpprof.experiments.records.result import PredictedTime
from dpprof.predict.step_time.intervals import ALONE, IMAGES, SOURCES, widen
from dpprof.predict.step_time.op_time import Z_90
from dpprof.results.analysis.advice.ratios import split_step

STEP = PredictedTime(
    median=1.0, low=1 / 1.2, high=1.5, rests_on={"data sheet": 1.0}, waiting_share=0.0
)


def ask(target: str, **fields: object) -> PredictedTime:
    fields = {"method": "standard", "device": "cuda", "target": target, **fields}
    return widen(STEP, make_experiment(**fields), registry.load("targets", target))


@pytest.mark.parametrize(
    ("target", "fields", "more", "told"),
    [
        ("a100", {}, 0.0, None),
        ("h200", {"method": "flash-bk"}, 0.0, None),
        ("t4", {"method": "flash-bk"}, ALONE, "no private step on one GPU of compute capability 7"),
        ("l40s", {}, ALONE, "no plain step on one GPU of compute capability 8.9"),
        ("h100", {"method": "flash", "parallel": "kind=ddp,world_size=8"}, ALONE, "several GPUs"),
        ("a100", {"model": {"hf": "vit-base"}, "seq_len": None}, IMAGES, "image models"),
    ],
)
def test_what_nobody_measured_is_said_and_widens(target, fields, more, told) -> None:
    step = ask(target, **fields)
    spread = math.hypot(SOURCES, more)

    assert step.between_sources == pytest.approx(spread)
    assert told is None if step.unlike is None else told in step.unlike
    assert math.log(step.high) == pytest.approx(math.hypot(math.log(1.5), Z_90 * spread))
    assert -math.log(step.low) == pytest.approx(math.hypot(math.log(1.2), Z_90 * spread))


def test_what_differs_between_sources_does_not_differ_between_methods() -> None:
    """Two methods are compared in one program on one machine, so a ratio leaves it out."""
    experiment = make_experiment(method="standard", device="cuda", target="l4")
    narrow = STEP.model_copy(update={"low": 1 / 1.2, "high": 1.2})
    wide = widen(narrow, experiment, registry.load("targets", "l4"))

    alone, widened = (split_step(step, [], experiment, 1).spread for step in (narrow, wide))
    assert widened == pytest.approx(alone)
