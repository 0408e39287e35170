"""Rules of group and instance normalisation, whose scale and shift have a number for each channel.

To normalise B samples of G groups is to normalise one sample of B G groups, whose B C channels have
scales and shifts of their own. So one call of PyTorch's backward gives the gradient of the input,
and those of every sample's scales and shifts, at the cost of an ordinary backward.

Shape legend: B samples, C channels, G groups, (...) axes of space.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpprof.private.contributions.contributions import Receive, SampleGradients
from dpprof.private.layers.layers import (
    apply,
    cast_for_normalisation,
    differentiate_again,
    scale_gradient,
)
from dpprof.private.norms import placement

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The formats in which channels lie last, by the number of axes."""


class _GroupNorm(torch.autograd.Function):
    """Normalise groups of channels, scale and shift."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes them so)
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        receive: Receive,
    ) -> Tensor:
        B, C = x.shape[:2]
        sizes = (B, C, x.shape[2:].numel(), groups)
        y, mean_BG, rstd_BG = torch.ops.aten.native_group_norm(x, weight, bias, *sizes, eps)
        ctx.save_for_backward(x, mean_BG, rstd_BG)
        ctx.weight, ctx.bias, ctx.receive = weight, bias, receive
        ctx.groups, ctx.eps = groups, eps
        ctx.clipped = [parameter for parameter in (weight, bias) if parameter is not None]
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, mean_BG, rstd_BG = ctx.saved_tensors
        B, C = x.shape[:2]
        repeated = None
        if ctx.needs_input_grad[0] and torch.is_grad_enabled():
            scaled = scale_gradient(g.reshape(B, C, -1).mT, ctx.weight, ctx.receive)
            repeated = differentiate_again(
                lambda x: functional.group_norm(x, ctx.groups, eps=ctx.eps),
                *(x, scaled.mT.reshape(g.shape)),
            )
            x, g = x.detach(), g.detach()
        weight = None if ctx.weight is None else ctx.weight.repeat(B)
        input_gradient, of_weight, of_bias = torch.ops.aten.native_group_norm_backward(
            *(g.contiguous().flatten(0, 1)[None], x.contiguous().flatten(0, 1)[None]),
            *(mean_BG.view(1, -1), rstd_BG.view(1, -1), weight),
            *(1, B * C, x.shape[2:].numel(), mean_BG.numel()),
            list(ctx.needs_input_grad[:3]),
        )
        both = zip(
            (ctx.weight, ctx.bias), (of_weight, of_bias), ctx.needs_input_grad[1:3], strict=True
        )
        contributions = [(p, SampleGradients(g.view(B, C))) for p, g, needed in both if needed]
        ctx.receive(contributions, may_repeat=True)
        if repeated is not None:
            input_gradient = repeated
        elif ctx.needs_input_grad[0]:
            input_gradient = input_gradient.view(x.shape)
            if not x.is_contiguous():
                input_gradient = torch.empty_like(x).copy_(input_gradient)
        return input_gradient, None, None, None, None, None


def run_group_norm(layer: nn.GroupNorm, receive: Receive, input: Tensor) -> Tensor:  # noqa: A002
    """Run a group norm, in float32 under CUDA's autocast."""
    return _run(layer, receive, input, layer.num_groups)


def run_instance_norm(layer: Any, receive: Receive, input: Tensor) -> Tensor:  # noqa: A002
    """Run an instance norm: a group norm with a channel in each group.

    Raises:
        ValueError: The input has no batch axis, or one value for each channel.
    """
    layer._check_input_dim(input)  # noqa: SLF001 (it has no public name)
    name, shape = type(layer).__name__, tuple(input.shape)
    if input.dim() == layer._get_no_batch_dim():  # noqa: SLF001
        raise ValueError(f"{name} got an input of shape {shape}; give it a batch axis")
    if input.shape[2:].numel() == 1:
        raise ValueError(f"{name} needs several values for each channel, and got {shape}")
    # Autocast leaves it in the dtype of its input.
    return _run(layer, receive, input, layer.num_features).to(input.dtype)


def _run(layer: Any, receive: Receive, x: Tensor, groups: int) -> Tensor:
    if x.dim() < 2:  # noqa: PLR2004
        raise ValueError(
            f"{type(layer).__name__} got an input of a single axis; give it a batch axis"
        )
    x = cast_for_normalisation(x)
    # As PyTorch does: on a CPU alone channels may lie last.
    lies_last = x.dim() in _LAST and x.is_contiguous(memory_format=_LAST[x.dim()])
    if placement.is_cuda(x) or not lies_last:
        x = x.contiguous()
    return apply(_GroupNorm, x, layer.weight, layer.bias, groups, layer.eps, receive)
