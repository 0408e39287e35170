"""Opacus's optimizers: how dpprof wraps them, and where they keep their tensors."""

from collections.abc import Mapping
from typing import Any

from opacus.grad_sample import create_or_accumulate_grad_sample
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _generate_noise
from torch.optim import Optimizer

from dpprof.records.births import Function
from dpprof.records.result import Component
from dpprof.spec.experiment import Experiment

ATTRIBUTES: Mapping[str, Component] = {
    "grad_sample": "per_sample_gradients",
    "_current_grad_sample": "per_sample_gradients",
    "_norm_sample": "norm_samples",
    "summed_grad": "summed_gradients",
}
"""Attributes in which Opacus keeps tensors of a parameter."""

BIRTHS: Mapping[Function, Component] = {
    create_or_accumulate_grad_sample: "per_sample_gradients",
    _generate_noise: "noise",
}
"""Opacus's functions whose tensors may be freed before a look at attributes finds them."""


def wrap_optimizer(
    wrapper: type[DPOptimizer], optimizer: Optimizer, experiment: Experiment, **others: Any
) -> DPOptimizer:
    """Return a wrapped optimizer, as of ``PrivacyEngine.make_private`` for a fixed batch size.

    Args:
        wrapper: The class of Opacus's optimizer.
        optimizer: The optimizer to wrap.
        experiment: The source of the settings.
        others: Settings that differ from the experiment's.
    """
    settings: dict[str, Any] = {
        "noise_multiplier": experiment.noise_multiplier,
        "max_grad_norm": experiment.max_grad_norm,
        "expected_batch_size": experiment.batch_size,
        "loss_reduction": "mean",
    }
    return wrapper(optimizer, **settings | others)
