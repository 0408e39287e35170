"""DP-SGD one sample at a time: slow and simple. It defines the correct gradient.

Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", algorithm 1.
Cost: the FLOPs of the standard step in B small pieces, and P elements of memory for the running
sum beside the current sample's gradient.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.allocation_marks import allocates
from dpprof.private.engine.factor import clip_factor
from dpprof.private.errors import UnsupportedError
from dpprof.private.norms.complex_numbers import as_real
from dpprof.subjects.methods.losses import losses_of
from dpprof.subjects.methods.training_step import Batch, Enter, TrainingStep


class Microbatch(TrainingStep):
    """A loop over samples with ordinary autograd.

    Raises:
        UnsupportedError: ``reentrant`` checkpointing, which ``torch.autograd.grad`` refuses.

    Formal guarantees: the sum before noise has L2 sensitivity ``max_grad_norm`` under adding or
    removing one sample. A sample whose loss or gradient is not finite adds nothing; the gradient
    of an empty batch is only noise.
    """

    one_at_a_time = True
    losses: ClassVar[Collection[str]] = ("cross-entropy", "labels", "sum-of-logits")

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        if experiment.checkpointing == "reentrant":
            raise UnsupportedError(
                "reentrant checkpointing works with backward() alone; use non-reentrant"
            )
        super().__init__(model, experiment)

    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``."""
        bound = self.experiment.max_grad_norm
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        sums = _start_sums(parameters)
        for labels_T, *inputs in zip(batch.labels, *batch.inputs, strict=True):
            enter("forward")
            one = (tensor[None] for tensor in inputs)
            loss = losses_of(self, labels_T[None], *one).mean()
            enter("backward")
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            enter("clip")
            norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients])
            norm = torch.linalg.vector_norm(norms)
            factor = clip_factor(norm, bound)
            # Mask and do not multiply: zero times infinity is not zero.
            left_out = ~(torch.isfinite(norm) & torch.isfinite(loss.detach()))
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_((gradient * factor).masked_fill_(left_out, 0.0))
            # Free them before the next sample's gradients exist.
            del gradient, gradients, norms, norm, factor, left_out
        enter("noise")
        scale = self.experiment.noise_multiplier * bound
        for parameter, total in zip(parameters, sums, strict=True):
            real = as_real(total)
            real.add_(_draw_noise(real, scale))
            parameter.grad = total.div_(self.experiment.batch_size)


@allocates("summed_gradients")
def _start_sums(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(parameter) for parameter in parameters]


@allocates("noise")
def _draw_noise(like: Tensor, scale: float) -> Tensor:
    return torch.randn_like(like) * scale
