"""Opacus's optimizers, with the step taken apart into its phases."""

from typing import Any

from opacus.optimizers import DPOptimizer
from torch.optim import Optimizer

from dpprof.experiment import Experiment


def wrap_optimizer(
    wrapper: type[DPOptimizer], optimizer: Optimizer, experiment: Experiment
) -> DPOptimizer:
    """Wrap an optimizer as ``PrivacyEngine.make_private`` does for a fixed batch size."""
    settings: dict[str, Any] = {
        "noise_multiplier": experiment.noise_multiplier,
        "max_grad_norm": experiment.max_grad_norm,
        "expected_batch_size": experiment.batch_size,
        "loss_reduction": "mean",
    }
    return wrapper(optimizer, **settings)
