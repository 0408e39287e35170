"""Opacus's optimizers, with the step taken apart into its phases."""

from collections.abc import Mapping
from typing import Any

from opacus.grad_sample import create_or_accumulate_grad_sample
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _generate_noise
from torch.optim import Optimizer

from dpprof.records.births import Function
from dpprof.records.terms import Component
from dpprof.spec.experiment import Experiment

ATTRIBUTES: Mapping[str, Component] = {
    "grad_sample": "per_sample_gradients",
    "_current_grad_sample": "per_sample_gradients",
    "_norm_sample": "norm_samples",
    "summed_grad": "summed_gradients",
}
"""Where Opacus keeps what belongs to a parameter."""

BIRTHS: Mapping[Function, Component] = {
    create_or_accumulate_grad_sample: "per_sample_gradients",
    _generate_noise: "noise",
}
"""Opacus's functions that make what may be gone before anybody looks."""


def wrap_optimizer(
    wrapper: type[DPOptimizer], optimizer: Optimizer, experiment: Experiment, **others: Any
) -> DPOptimizer:
    """Wrap an optimizer as ``PrivacyEngine.make_private`` does for a fixed batch size.

    Args:
        wrapper: Opacus's optimizer.
        optimizer: What it wraps.
        experiment: Tells the wrapper's settings.
        others: Settings that are not as the experiment tells them.
    """
    settings: dict[str, Any] = {
        "noise_multiplier": experiment.noise_multiplier,
        "max_grad_norm": experiment.max_grad_norm,
        "expected_batch_size": experiment.batch_size,
        "loss_reduction": "mean",
    }
    return wrapper(optimizer, **settings | others)
