"""The layers that clipping knows: how each is run, and what it adds to a gradient.

Each is an autograd function of its own. Its backward computes the gradient of the layer's
input, as autograd would, and hands over what the gradients of the parameters are made of
in place of computing them. What it needs is what it saved, so activation checkpointing
works as with any function, and no hook has to match calls with gradients.

Shape legend: B samples, T tokens (all axes between the first and the last), d width of an
input, p width of an output.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpprof.catalogue import UnsupportedError
from dpprof.clipping.shares import Lookup, Product, Scale, Share, Shift, Whole

Forward = Callable[..., Tensor]
Added = Sequence[tuple[nn.Parameter | None, Share | None]]


class Use(Protocol):
    """A layer's connection to the clipping under way."""

    def hand_over(self, added: Added) -> Sequence[Tensor | None]:
        """Take what a layer adds to its parameters' gradients.

        Returns:
            For each parameter the gradient that autograd is to accumulate, or None.
        """


def _tokens(x: Tensor) -> Tensor:
    """See an input as (B, T, width)."""
    if x.dim() < 2:  # noqa: PLR2004
        raise ValueError("an input of a single axis has no samples; give it a batch axis")
    return x[:, None] if x.dim() == 2 else x.flatten(1, -2)  # noqa: PLR2004


def is_cuda(x: Tensor) -> bool:
    """Tell whether a tensor follows CUDA's rules."""
    return x.is_cuda


def _in_norms_precision(x: Tensor) -> Tensor:
    """Turn a normalisation's input into float32 where autocast does: on CUDA."""
    return x.float() if is_cuda(x) and _autocast_dtype(x) is not None else x


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


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
        added: Added = [
            (ctx.weight, Product(_tokens(x.detach()), of_tokens, ctx.transposed))
            if ctx.needs_input_grad[1]
            else (None, None),
            (ctx.bias, Shift(of_tokens)) if ctx.needs_input_grad[2] else (None, None),
        ]
        return of_input, *ctx.use.hand_over(added), None, None


class _Embedding(torch.autograd.Function):
    """Rows of a table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, use: Use) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.use = weight, padding, use
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        share = Lookup(ids.flatten(1), _tokens(g), ctx.weight.shape[0], ctx.padding)
        return None, *ctx.use.hand_over([(ctx.weight, share)]), None, None


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
        added: Added = [
            (ctx.weight, Scale(flat[0], flat[1], flat[2], flat[3]))
            if ctx.needs_input_grad[1]
            else (None, None),
            (ctx.bias, Shift(flat[3])) if ctx.needs_input_grad[2] else (None, None),
        ]
        return of_input, *ctx.use.hand_over(added), None, None


class _RMSNorm(torch.autograd.Function):
    """Divide the last axes by their root mean square, and scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.RMSNorm, use: Use) -> Tensor:
        axes = list(range(-len(layer.normalized_shape), 0))
        exact = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
        rstd = exact.square().mean(axes, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd)
        ctx.weight, ctx.axes, ctx.use = weight, axes, use
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
        axes = len(ctx.axes)
        flat_x, flat_rstd, flat_g = (_tokens(t.flatten(-axes)) for t in (x.detach(), rstd, g))
        added: Added = [(ctx.weight, Scale(flat_x, None, flat_rstd, flat_g))]
        return of_input, *ctx.use.hand_over(added), None, None


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


class _Other(torch.autograd.Function):
    """Any layer, whose per-sample gradients ``torch.func`` makes."""

    @staticmethod
    def forward(
        ctx: Any, plain: nn.Module, use: Use, names: Sequence[str], *tensors: Tensor
    ) -> Any:
        count = len(names)
        ctx.save_for_backward(*tensors[count:])
        ctx.parameters, ctx.plain, ctx.use, ctx.names = tensors[:count], plain, use, names
        y = plain(*tensors[count:])
        if not isinstance(y, Tensor):
            raise UnsupportedError(f"{type(plain).__name__} returns no tensor, and has no rule")
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        count = len(ctx.names)
        inputs = ctx.saved_tensors
        needed = [i for i in range(len(inputs)) if ctx.needs_input_grad[3 + count + i]]

        def of_sample(*given: Tensor) -> Any:
            *xs, g_b = given

            def run(parameters: Sequence[Tensor], differentiated: Sequence[Tensor]) -> Tensor:
                whole = [x[None] for x in xs]
                for i, x in zip(needed, differentiated, strict=True):
                    whole[i] = x[None]
                state = dict(zip(ctx.names, parameters, strict=True))
                y: Tensor = torch.func.functional_call(ctx.plain, state, tuple(whole))
                return y[0]

            pull_back = torch.func.vjp(run, list(ctx.parameters), [xs[i] for i in needed])[1]
            return pull_back(g_b)

        of_parameters, of_inputs = torch.func.vmap(of_sample)(*inputs, g)
        added: Added = [
            (parameter, Whole(gradients)) if parameter.requires_grad else (None, None)
            for parameter, gradients in zip(ctx.parameters, of_parameters, strict=True)
        ]
        found = dict(zip(needed, of_inputs, strict=True))
        of_all = [found.get(i) for i in range(len(inputs))]
        return None, None, None, *ctx.use.hand_over(added), *of_all


def run_other(layer: nn.Module, use: Use) -> Forward:
    """Run a layer that has no rule; each sample's gradient is made, as Opacus's functorch does."""
    plain = copy.copy(layer)  # its own forward will be called, not the one that is put in place
    names = [name for name, _ in layer.named_parameters()]

    def forward(*inputs: Tensor) -> Tensor:
        parameters = [parameter for _, parameter in layer.named_parameters()]
        return _apply(_Other, plain, use, names, *parameters, *inputs)

    return forward


RULES: Mapping[str, Callable[[Any, Use], Forward]] = {
    "torch.nn.modules.linear.Linear": run_linear,
    "torch.nn.modules.sparse.Embedding": run_embedding,
    "torch.nn.modules.normalization.LayerNorm": run_layer_norm,
    "torch.nn.modules.normalization.RMSNorm": run_rms_norm,
    "transformers.pytorch_utils.Conv1D": run_conv1d,
}
"""By the name of the class whose ``forward`` they stand for."""


def refuse_mixing(layer: nn.Module) -> None:
    """Refuse what makes one sample's gradient depend on others, with parameters or without.

    Raises:
        UnsupportedError: The layer is a batch normalisation.
    """
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 (the common base)
        raise UnsupportedError(f"{type(layer).__name__} mixes samples; use GroupNorm or LayerNorm")


def find_rule(layer: nn.Module) -> Callable[[Any, Use], Forward]:
    """Find how a layer is run: by its own rule, or if it has none by ``torch.func``.

    A subclass has the rule of the class whose ``forward`` it inherits.

    Raises:
        UnsupportedError: The layer has parameters beside layers in it, or is run by something
            else, such as another ``Clipping``.
    """
    if "forward" in vars(layer):
        raise UnsupportedError(
            f"{type(layer).__name__} is run by something else already; remove() that first"
        )
    for base in type(layer).__mro__:
        rule = RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None and vars(base).get("forward") == type(layer).forward:
            return rule
    if any(True for child in layer.children() for _ in child.parameters()):
        raise UnsupportedError(
            f"{type(layer).__name__} has parameters of its own beside the layers in it; put them "
            "into a layer without others, or freeze them"
        )
    return run_other
