"""Takes the noise out of Adam's second moment (DP-AdamBC).

Adam divides by the root of v, an average of squared gradients, to which noise adds its variance,
(noise_multiplier C / divisor)^2. Where that is most of v, all elements are divided by about the
same number, and Adam becomes SGD with momentum. The correction divides by the root of v less that
variance, and not less than a floor. Source: Tang et al. 2024, "DP-AdamBC: Your DP-Adam Is Actually
DP-SGD (Unless You Apply Bias Correction)", arXiv 2312.14334, algorithm 1.

It follows PyTorch's own step: what that took off a parameter is replaced. Both follow from the same
averages, so every way in which PyTorch computes the step (fused, for each parameter) will do. Cost:
four tensors of a parameter's size, one parameter at a time, and no FLOPs of products.
"""

import math

import torch

from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.noise.schedules import NOISY

_VARIANCE = "noise_variance"  # in a parameter's state: averaged as Adam averages squares


def correct_second_moment(optimizer: NoisyOptimizer, floor: float | None) -> None:
    """Divide by what Adam's second moment has beside noise, until the optimizer is removed.

    ``floor`` is the least that the corrected second moment counts as; None leaves Adam as it
    is. ``ValueError``: it is out of its range, or the optimizer is no ``AdamW`` with
    independent noise. Formal guarantee: that of the optimizer. Noise multiplier, C and divisor
    are public, and all else follows from gradients that have noise.
    """
    if floor is None:
        return
    inner = optimizer.original_optimizer
    if not (math.isfinite(floor) and floor > 0):
        raise ValueError(f"second_moment_floor must be positive and finite, and is {floor}")
    if not isinstance(inner, torch.optim.AdamW) or any(g["amsgrad"] for g in inner.param_groups):
        raise ValueError(
            f"second_moment_floor is for torch.optim.AdamW without amsgrad, and the optimizer is "
            f"{type(inner).__name__}"
        )
    if optimizer.strategy is not None:
        raise ValueError(
            "second_moment_floor subtracts the variance of independent noise; that of correlated "
            "noise differs from step to step"
        )

    def follow_step(*_: object) -> None:
        if getattr(inner, NOISY, None) is optimizer:
            _correct(optimizer, floor)
        else:
            handle.remove()

    handle = inner.register_step_post_hook(follow_step)


@torch.no_grad()
def _correct(optimizer: NoisyOptimizer, floor: float) -> None:
    """Replace what PyTorch's step took off each parameter."""
    size = optimizer.expected_batch_size if optimizer.loss_reduction == "mean" else 1.0
    assert size is not None
    variance = (optimizer.noise_multiplier * optimizer.max_grad_norm / size) ** 2
    for group in optimizer.param_groups:
        mean_decay, decay = group["betas"]
        for parameter in (p for p in group["params"] if p.grad is not None):
            state = optimizer.state[parameter]
            before = state.get(_VARIANCE, 0.0)
            state[_VARIANCE] = decay * before + (1 - decay) * variance
            step = state["step"]
            step = step.item() if step.is_cpu else step  # read no number from a GPU
            seen = 1 - decay**step
            second = state["exp_avg_sq"] / seen
            usual = second.sqrt() + group["eps"]
            corrected = (second - state[_VARIANCE] / seen).clamp_(min=floor).sqrt_()
            mean = state["exp_avg"] / (1 - mean_decay**step)
            parameter.add_(mean * group["lr"] * (1 / usual - 1 / corrected))
