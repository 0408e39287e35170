"""Compares the loss of a user's batch, and its gradient, with those of its samples alone.

Shape legend: B samples.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from dpprof.verification.training_gradients import Sample, clip, find_difference
from dpprof.verification.training_loop import Gradients, Loop, WrongTrainingError


def compare_each(together_B: Tensor, alone_B: Tensor, limit: float) -> None:
    """Compare the samples' losses in the batch with their losses alone; float64."""
    if _is_close(together_B, alone_B, limit):
        return
    count = len(alone_B)
    for factor, reason in (
        (1 / count, f"1/{count} of its loss alone: the mean over the batch is taken twice"),
        (count, f"{count} times its loss alone: it depends on the size of the batch"),
    ):
        if _is_close(together_B, alone_B * factor, limit):
            raise WrongTrainingError(f"each sample's loss in the batch is {reason}")
    pairs = enumerate(zip(together_B, alone_B, strict=True))
    at = next(at for at, (one, other) in pairs if not _is_close(one, other, limit))
    raise WrongTrainingError(
        f"the loss of sample {at} is {alone_B[at]:.6g} alone and {together_B[at]:.6g} in the "
        "batch: the model or the loss mixes samples"
    )


def compare_whole(together: Tensor, alone_B: Tensor, limit: float, *, averages: bool) -> None:
    """Compare the batch's loss with the mean of its samples' losses, or their sum; float64."""
    mean, total, count = alone_B.mean(), alone_B.sum(), len(alone_B)
    if _is_close(together, mean if averages else total, limit):
        return
    if averages and _is_close(together, total, limit):
        raise WrongTrainingError("the loss sums over the batch, and the optimizer expects a mean")
    if not averages and _is_close(together, mean, limit):
        raise WrongTrainingError(
            "the loss is a mean over the batch, and the optimizer expects a sum"
        )
    if _is_close(together, mean / count, limit):
        raise WrongTrainingError(
            f"the loss is 1/{count} of the samples' mean: the mean over the batch is taken twice"
        )
    raise WrongTrainingError(
        f"the batch's loss is {together:.6g}, and the mean over its samples alone is {mean:.6g}: "
        "samples are mixed, or the mean is over all tokens of the batch"
    )


def compare_unclipped(
    loop: Loop, found: Gradients, samples: Sequence[Sample], divisor: float, limit: float
) -> None:
    """Compare the gradient of the batch's loss with those of its samples, all unclipped."""
    expected = clip(samples, [(loop.trained, math.inf)], divisor)
    first, _ = find_difference(found, expected, limit)
    if first is not None:
        raise WrongTrainingError(
            f"{loop.names[first]}: the gradient of the batch's loss is not that of its samples "
            "alone: samples are mixed, or the mean is over all tokens of the batch"
        )


def _is_close(found: Tensor, expected: Tensor, limit: float) -> bool:
    return bool(((found - expected).abs() <= limit * expected.abs() + 1e-12).all())
