"""Widens the interval of a predicted step for what differs between sources.

The errors of operators are those of a model of a GPU. Whoever measured a step also had a machine,
versions and a program of their own, which shift all of its steps together. How much is calibrated
by leaving whole sources out (perf/intervals.md), and more where nobody measured the like.
"""

import math

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.target import Target
from dpprof.experiments.records.result import PredictedTime
from dpprof.predict.step_time.op_time import Z_90

SOURCES = 0.17
"""Standard deviation of the logarithm of a step's time between sources: the least with which nine
of ten steps are inside, where each source counts the same, whichever source is left out."""

ALONE = 0.19
"""What is added where no step of the kind was compared: the least with which that holds for every
source whose texts are the only ones of their kind."""

IMAGES = 0.79
"""What is added for image models, whose times three sources have: small convolutions, and small
products of one sample, took up to six times as long as predicted, large ones two thirds."""

COMPARED = {
    ("7.0", "private", "one GPU"),
    ("7.5", "plain", "one GPU"),
    ("8.0", "plain", "one GPU"),
    ("8.0", "plain", "several GPUs"),
    ("8.0", "private", "one GPU"),
    ("9.0", "plain", "one GPU"),
    ("9.0", "plain", "several GPUs"),
    ("9.0", "private", "one GPU"),
}
"""Compute capability, training and number of GPUs of which steps on texts were compared."""


def widen(step: PredictedTime, experiment: Experiment, target: Target) -> PredictedTime:
    """Return a step with a wider interval, and what of its kind nobody measured.

    Errors are independent: the logarithms of the ends add up as squares.
    """
    unlike, more = _compare(experiment, target)
    spread = math.hypot(SOURCES, more)
    below, above = math.log(step.median / step.low), math.log(step.high / step.median)
    ends = {
        "low": step.median / math.exp(math.hypot(below, Z_90 * spread)),
        "high": step.median * math.exp(math.hypot(above, Z_90 * spread)),
    }
    return step.model_copy(update={**ends, "between_sources": spread, "unlike": unlike})


def _compare(experiment: Experiment, target: Target) -> tuple[str | None, float]:
    """Return what of a step's kind was never compared, and the spread that this adds."""
    if experiment.image_size is not None:
        return "the few who timed image models differ from predictions in both directions", IMAGES
    training = "plain" if experiment.method == "standard" else "private"
    gpus = "one GPU" if experiment.world_size == 1 else "several GPUs"
    capability = target.compute_capability
    if (capability, training, gpus) in COMPARED:
        return None, 0.0
    return f"no {training} step on {gpus} of compute capability {capability} was compared", ALONE
