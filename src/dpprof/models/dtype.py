"""Applies an experiment's dtype to a model."""

import torch
from torch import Tensor, nn

from dpprof.spec.experiment import Experiment


def apply_dtype(model: nn.Module, experiment: Experiment, device: torch.device) -> nn.Module:
    """Return a model, already on its device, with the experiment's precision.

    float64 converts parameters. bfloat16 is autocast of the forward pass: parameters, gradients and
    optimizer state stay float32, and the backward pass uses the forward pass's dtypes. Logits are
    converted to float32, so the loss is float32. float32 and tf32 change nothing here; tf32 is a
    setting of the device. ``parameters_dtype`` is applied where the model is built. Of FSDP it is a
    policy in place of autocast (``distribute``).
    """
    if experiment.dtype == "float64":
        return model.double()
    is_sharded = experiment.parallel is not None and experiment.parallel.kind == "fsdp"
    if experiment.dtype == "bfloat16" and not is_sharded:
        forward = model.forward

        def forward_in_bfloat16(*inputs: Tensor) -> Tensor:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits_BTV: Tensor = forward(*inputs)
            return logits_BTV.float()

        model.forward = forward_in_bfloat16
    return model
