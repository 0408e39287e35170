"""DP-SGD with ``torch.func``: the gradients of all samples at once, clipped and summed."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.terms import Component
from dpprof.private.allocation_marks import allocates
from dpprof.private.engine.factor import clip_factor
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.training_step import Batch, Enter, TrainingStep, mean_loss


class VmapClipping(TrainingStep):
    """Flat clipping: L2 sensitivity ``max_grad_norm`` under adding or removing one sample."""

    attributes: ClassVar[Mapping[str, Component]] = {"sample_gradients": "per_sample_gradients"}

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        if next(model.buffers(), None) is not None:
            raise UnsupportedError("the model has buffers, which samples would share")
        super().__init__(model, experiment)

    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``."""
        experiment, bound = self.experiment, self.experiment.max_grad_norm
        named: dict[str, Any] = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        enter("backward")  # forward is within it
        detached = {name: parameter.detach() for name, parameter in named.items()}
        gradients = vmap(grad(self.sample_loss), in_dims=(None, 0, 0))(detached, *batch)
        for name, parameter in named.items():
            parameter.sample_gradients = gradients.pop(name)
        enter("clip")
        norms_B = find_norms([parameter.sample_gradients for parameter in named.values()])
        for parameter in named.values():
            parameter.grad = sum_clipped(parameter.sample_gradients, clip_factor(norms_B, bound))
            parameter.sample_gradients = None
        enter("noise")
        for parameter in named.values():
            parameter.grad += draw_noise(parameter, experiment.noise_multiplier * bound)
            parameter.grad /= experiment.batch_size

    def sample_loss(self, parameters: Any, tokens_T: Tensor, labels_T: Tensor) -> Tensor:
        """Compute one sample's loss as a function of the parameters."""
        logits_1TV = functional_call(self.module, parameters, (tokens_T[None],))
        return mean_loss(logits_1TV, labels_T[None])


@allocates("norm_samples")
def find_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Find each sample's norm over all parameters; (B,)."""
    return torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)


@allocates("summed_gradients")
def sum_clipped(gradients: Tensor, factors_B: Tensor) -> Tensor:
    """Sum one parameter's gradients over samples, each scaled by its factor.

    A sample whose norm is not finite, so that its factor is zero or no number, adds nothing.
    """
    left_out_B = ~(factors_B > 0)
    gradients.masked_fill_(left_out_B.view(-1, *[1] * (gradients.dim() - 1)), 0.0)
    summed: Tensor = torch.einsum("b,b...", factors_B.masked_fill(left_out_B, 0.0), gradients)
    return summed


@allocates("noise")
def draw_noise(like: Tensor, std: float) -> Tensor:
    """Draw Gaussian noise of a tensor's shape."""
    return torch.randn_like(like) * std
