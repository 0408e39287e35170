"""The layers that clipping knows: how each is run, and what it adds to a gradient.

Each is an autograd function of its own. Its backward computes the gradient of the layer's
input, as autograd would, and hands over what the gradients of the parameters are made of
in place of computing them. What it needs is what it saved, so activation checkpointing
works as with any function, and no hook has to match calls with gradients.

Shape legend: B samples, T tokens (all axes between the first and the last), d width of an
input, p width of an output.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional

from dpprof.clipping.contributions import Contribution, Lookup, Product, Scale, Shift
from dpprof.clipping.graph import nodes_behind
from dpprof.norms import placement
from dpprof.spec.registry import UnsupportedError

Forward = Callable[..., Tensor]
Added = Sequence[tuple[nn.Parameter, Contribution]]


class Use(Protocol):
    """A layer's connection to the clipping under way."""

    def hand_over(self, added: Added) -> None:
        """Take what a layer adds to its parameters' gradients."""


def _tokens(x: Tensor) -> Tensor:
    """See an input as (B, T, width)."""
    if x.dim() < 2:  # noqa: PLR2004
        raise ValueError("an input of a single axis has no samples; give it a batch axis")
    return x[:, None] if x.dim() == 2 else x.flatten(1, -2)  # noqa: PLR2004


def _in_norms_precision(x: Tensor) -> Tensor:
    """Turn a normalisation's input into float32 where autocast does: on CUDA."""
    casts = placement.follows_cuda_autocast(x) and _autocast_dtype(x) is not None
    return x.float() if casts else x


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def count_uses(losses: Tensor) -> Counter[nn.Parameter]:
    """Count how often losses depend on each parameter through a layer that is run here.

    What reentrant checkpointing hides is not counted.
    """
    uses: Counter[nn.Parameter] = Counter()
    for node in nodes_behind(losses):
        if isinstance(node, BackwardCFunction):
            uses.update(getattr(node, "clipped", ()))
    return uses


def _apply(function: Any, *given: Any) -> Tensor:
    y: Tensor = function.apply(*given)
    return y


class _Linear(torch.autograd.Function):
    """``x W^T + b``, or ``x W + b`` where the weight is (d, p)."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes them so)
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, use: Use
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.transposed, ctx.use = weight, bias, transposed, use
        ctx.clipped = [weight] if bias is None else [weight, bias]
        matrix = weight.to(x.dtype)
        return functional.linear(
            x, matrix.t() if transposed else matrix, None if bias is None else bias.to(x.dtype)
        )

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        of_input = None
        if ctx.needs_input_grad[0]:
            matrix = ctx.weight.to(g.dtype)
            of_input = g @ (matrix.t() if ctx.transposed else matrix)
        of_tokens = _tokens(g)
        added: list[tuple[nn.Parameter, Contribution]] = []
        if ctx.needs_input_grad[1]:
            added.append((ctx.weight, Product(_tokens(x.detach()), of_tokens, ctx.transposed)))
        if ctx.needs_input_grad[2]:
            added.append((ctx.bias, Shift(of_tokens)))
        ctx.use.hand_over(added)
        return of_input, None, None, None, None


class _Embedding(torch.autograd.Function):
    """Rows of a table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, use: Use) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.use, ctx.clipped = weight, padding, use, [weight]
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        contribution = Lookup(ids.flatten(1), _tokens(g), ctx.weight.shape[0], ctx.padding)
        ctx.use.hand_over([(ctx.weight, contribution)])
        return None, None, None, None


class _LayerNorm(torch.autograd.Function):
    """Normalise the last axes, scale and shift."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: nn.LayerNorm,
        use: Use,
    ) -> Tensor:
        shape = list(layer.normalized_shape)
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, layer.eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.shape, ctx.use = weight, bias, shape, use
        ctx.clipped = [one for one in (weight, bias) if one is not None]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, mean, rstd = ctx.saved_tensors
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = torch.ops.aten.native_layer_norm_backward(
                g, x, ctx.shape, mean, rstd, ctx.weight, ctx.bias, [True, False, False]
            )[0]
        axes = len(ctx.shape)
        flat = [_tokens(t.flatten(-axes)) for t in (x.detach(), mean, rstd, g)]
        added: list[tuple[nn.Parameter, Contribution]] = []
        if ctx.needs_input_grad[1]:
            added.append((ctx.weight, Scale(flat[0], flat[1], flat[2], flat[3])))
        if ctx.needs_input_grad[2]:
            added.append((ctx.bias, Shift(flat[3])))
        ctx.use.hand_over(added)
        return of_input, None, None, None, None


class _RMSNorm(torch.autograd.Function):
    """Divide the last axes by their root mean square, and scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.RMSNorm, use: Use) -> Tensor:
        axes = list(range(-len(layer.normalized_shape), 0))
        exact = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
        rstd = exact.square().mean(axes, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd)
        ctx.weight, ctx.axes, ctx.use, ctx.clipped = weight, axes, use, [weight]
        return (exact * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, rstd = ctx.saved_tensors
        of_input = None
        if ctx.needs_input_grad[0]:
            scaled = g * ctx.weight
            normal = x * rstd
            common = (scaled * normal).mean(ctx.axes, keepdim=True)
            of_input = scaled.sub_(normal.mul_(common)).mul_(rstd).to(x.dtype)
        if ctx.needs_input_grad[1]:
            axes = len(ctx.axes)
            flat_x, flat_rstd, flat_g = (_tokens(t.flatten(-axes)) for t in (x.detach(), rstd, g))
            ctx.use.hand_over([(ctx.weight, Scale(flat_x, None, flat_rstd, flat_g))])
        return of_input, None, None, None


def run_linear(layer: nn.Linear, use: Use) -> Forward:
    """Run a linear layer; under autocast in its dtype, as PyTorch does."""

    def forward(input: Tensor) -> Tensor:  # noqa: A002 (the layer's own keyword)
        dtype = _autocast_dtype(input)
        x = input if dtype is None else input.to(dtype)
        return _apply(_Linear, x, layer.weight, layer.bias, False, use)

    return forward


def run_conv1d(layer: Any, use: Use) -> Forward:
    """Run GPT-2's Conv1D, a linear layer whose weight is (d, p)."""

    def forward(x: Tensor) -> Tensor:
        dtype = _autocast_dtype(x)
        x = x if dtype is None else x.to(dtype)
        return _apply(_Linear, x, layer.weight, layer.bias, True, use)

    return forward


def run_embedding(layer: nn.Embedding, use: Use) -> Forward:
    """Run a lookup.

    Raises:
        UnsupportedError: The layer changes its table in forward, or mixes samples.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(layer, option):
            raise UnsupportedError(f"an embedding with {option} has no exact per-sample gradient")
    padding = -1 if layer.padding_idx is None else layer.padding_idx

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        if input.dim() < 2 and torch.is_grad_enabled():  # noqa: PLR2004
            # Positions of one sample, or one id for each sample? They look the same.
            raise ValueError(
                f"an embedding looked up ids of shape {tuple(input.shape)}, of which no axis is "
                "known to be the batch's; give it (B, T), with a row for each sample"
            )
        return _apply(_Embedding, input, layer.weight, padding, use)

    return forward


def run_layer_norm(layer: nn.LayerNorm, use: Use) -> Forward:
    """Run a layer norm; under CUDA's autocast in float32, as PyTorch does."""

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        return _apply(_LayerNorm, _in_norms_precision(input), layer.weight, layer.bias, layer, use)

    return forward


def run_rms_norm(layer: nn.RMSNorm, use: Use) -> Forward:
    """Run an RMS norm; under CUDA's autocast in float32, as PyTorch does."""

    def forward(x: Tensor) -> Tensor:
        return _apply(_RMSNorm, _in_norms_precision(x), layer.weight, layer, use)

    return forward
