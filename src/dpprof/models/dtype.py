"""What an experiment's dtype means for a model."""

import torch
from torch import Tensor, nn

from dpprof.spec.experiment import Experiment


def apply_dtype(model: nn.Module, experiment: Experiment, device: torch.device) -> nn.Module:
    """Give a model on its device the precision that the experiment asks for.

    float64 converts parameters. bfloat16 is autocast: parameters, gradients and optimizer
    state stay float32, operators that gain from it compute in bfloat16. The forward
    pass alone runs under autocast, backward follows the dtypes that it left; logits are
    turned into float32, in which the loss is computed. float32 and tf32 change nothing
    here; tf32 is a setting of the device.
    """
    if experiment.dtype == "float64":
        return model.double()
    if experiment.dtype == "bfloat16":
        forward = model.forward

        def forward_in_bfloat16(tokens_BT: Tensor) -> Tensor:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits_BTV: Tensor = forward(tokens_BT)
            return logits_BTV.float()

        model.forward = forward_in_bfloat16
    return model
