"""Rules of the layer types that clipping knows: how each runs, and its contributions.

Each rule is an autograd function. Its backward computes the gradient of the layer's input as
autograd would. In place of the parameters' gradients it passes on contributions: the tensors that
determine the per-sample gradients. It needs only the tensors that it saved, so activation
checkpointing works, and no hook has to match forward calls with gradients. Where a loss contains a
gradient, autograd differentiates these backward passes again: then they run rules themselves.

Shape legend: B samples, T tokens (all axes between the first and the last), d width of an
input, p width of an output.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional

from dpprof.private.contributions.contributions import Contribution, Lookup, Product, Receive
from dpprof.private.contributions.sample_gradients import BesideScale, Scale, Shift
from dpprof.private.norms import placement
from dpprof.private.norms.complex_numbers import interleave, split_product
from dpprof.private.refusals.tensor_kinds import is_sparse


def _flatten(x: Tensor) -> Tensor:
    """Reshape an input to (B, T, width)."""
    if x.dim() < 2:  # noqa: PLR2004
        raise ValueError("an input of a single axis has no samples; give it a batch axis")
    return x[:, None] if x.dim() == 2 else x.flatten(1, -2)  # noqa: PLR2004


def cast_for_normalisation(x: Tensor) -> Tensor:
    """Cast a normalisation's input to float32 where autocast does: on CUDA."""
    if not x.is_floating_point():
        raise ValueError(f"a normalisation with real weights got an input of {x.dtype}; convert it")
    casts = placement.is_cuda(x) and autocast_dtype(x) is not None
    return x.float() if casts else x


def cast_weight(weight: Tensor, x: Tensor) -> Tensor:
    """Cast a weight to an input's dtype, which autocast may have chosen (``ValueError``)."""
    refuse_other_numbers(weight, x)
    return weight.to(x.dtype)


def refuse_other_numbers(weight: Tensor, x: Tensor) -> None:
    """Refuse complex numbers where a weight is real, and the other way round, and integers."""
    if x.is_complex() != weight.is_complex() or not (x.is_complex() or x.is_floating_point()):
        raise ValueError(f"a weight of {weight.dtype} got an input of {x.dtype}; convert one")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on a tensor's device, None where autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def count_uses(nodes: Iterable[Any]) -> Counter[nn.Parameter]:
    """Count the uses of each parameter by patched layers, among the nodes behind the losses."""
    uses: Counter[nn.Parameter] = Counter()
    for node in nodes:
        if isinstance(node, BackwardCFunction):
            uses.update(getattr(node, "clipped", ()))
    return uses


def apply(function: Any, *arguments: Any) -> Tensor:
    """Apply an autograd function."""
    y: Tensor = function.apply(*arguments)
    return y


def as_own(y: Tensor) -> Tensor:
    """Return a function's output as no view, which nothing else holds, to be changed in place."""
    owned: Tensor = torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y  # noqa: SLF001
    return owned


class _Linear(torch.autograd.Function):
    """``x W^T + b``, or ``x W + b`` where the weight is (d, p)."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes them so)
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, receive: Receive
    ) -> Tensor:
        if ctx.needs_input_grad[1]:  # other code may change it in place, as without clipping
            ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.transposed, ctx.receive = weight, bias, transposed, receive
        ctx.widths = 1  # for ``layout``: how many axes make a token, each of which it treats alike
        ctx.clipped = [weight] if bias is None else [weight, bias]
        matrix = cast_weight(weight, x)
        y = functional.linear(
            x, matrix.t() if transposed else matrix, None if bias is None else bias.to(x.dtype)
        )
        return as_own(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        # First: a checkpoint computes it again while no gradient of the input is there yet.
        x = ctx.saved_tensors[0] if ctx.needs_input_grad[1] else None
        input_gradient = None
        may_repeat = not g.is_complex()
        if ctx.needs_input_grad[0] and torch.is_grad_enabled() and may_repeat:
            input_gradient = apply(_Linear, g, ctx.weight, None, not ctx.transposed, ctx.receive)
        elif ctx.needs_input_grad[0]:
            matrix = ctx.weight.to(g.dtype).conj()
            input_gradient = g @ (matrix.t() if ctx.transposed else matrix)
        g_BTp = _flatten(g)
        contributions: list[tuple[nn.Parameter, Contribution]] = []
        if x is not None:
            product = _multiply_samples(_flatten(x.detach()), g_BTp, transposed=ctx.transposed)
            contributions.append((ctx.weight, product))
        if ctx.needs_input_grad[2]:
            contributions.append((ctx.bias, Shift(interleave(g_BTp))))
        ctx.receive(contributions, may_repeat=may_repeat)
        return input_gradient, None, None, None, None


def _multiply_samples(x_BTd: Tensor, g_BTp: Tensor, *, transposed: bool) -> Product:
    """Return the product that is the gradient of a weight, which is real: that of complex parts."""
    if not g_BTp.is_complex():
        return Product(x_BTd, g_BTp, transposed)
    if transposed:
        return Product(*split_product(x_BTd.conj(), g_BTp), transposed)
    g_BTp, x_BTd = split_product(g_BTp, x_BTd.conj())
    return Product(x_BTd, g_BTp)


class _Embedding(torch.autograd.Function):
    """Rows of a table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, receive: Receive) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.receive, ctx.clipped = weight, padding, receive, [weight]
        ctx.is_lookup = True  # for ``broadcasts``, which gives it ``shared``
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        shared = getattr(ctx, "shared", None)
        g_B = g if shared is None else shared.take(g)
        ids_B = ids if shared is None else ids.expand(len(g_B), *ids.shape)
        g_BTd = _flatten(interleave(g_B))
        contribution = Lookup(
            ids_B.reshape(g_BTd.shape[:2]), g_BTd, ctx.weight.shape[0], ctx.padding
        )
        ctx.receive([(ctx.weight, contribution)])
        return None, None, None, None


class _Scaled(torch.autograd.Function):
    """The gradient of a norm's output times the norm's scale, to be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, weight: Tensor, scale_of: Callable[[Tensor], Tensor], receive: Receive
    ) -> Tensor:
        ctx.save_for_backward(g)
        ctx.weight, ctx.scale_of, ctx.receive, ctx.clipped = weight, scale_of, receive, [weight]
        ctx.widths = weight.dim()
        return g * scale_of(weight)

    @staticmethod
    def backward(ctx: Any, again: Tensor) -> Any:
        (g,) = ctx.saved_tensors
        of_g = None
        if ctx.needs_input_grad[0]:
            of_g = scale_gradient(again, ctx.weight, ctx.receive, ctx.scale_of)
        contributions: list[tuple[nn.Parameter, Contribution]] = []
        if ctx.needs_input_grad[1]:
            products = (g.detach() * again).flatten(-ctx.widths)
            contributions.append((ctx.weight, Shift(_flatten(products))))
        ctx.receive(contributions, may_repeat=True)
        return of_g, None, None, None


def scale_gradient(
    g: Tensor,
    weight: Tensor | None,
    receive: Receive,
    scale_of: Callable[[Tensor], Tensor] = lambda weight: weight,
) -> Tensor:
    """Multiply the gradient of a norm's output by the scale of the last axes, which is clipped too.

    ``scale_of`` turns the weight into the scale; a norm without weight has none.
    """
    if weight is None:
        return g
    # What is not differentiated again needs no node.
    is_last = not torch.is_grad_enabled()
    return g * scale_of(weight) if is_last else apply(_Scaled, g, weight, scale_of, receive)


def differentiate_again(run: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Tensor:
    """Differentiate a function of ``x``, with its graph, so that autograd can do so again."""
    own = x.view_as(x)
    y = run(own)
    (gradient,) = torch.autograd.grad(y, own, g.to(y.dtype), create_graph=True)
    return gradient


class _LayerNorm(torch.autograd.Function):
    """Normalise the last axes, scale and shift."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: nn.LayerNorm,
        receive: Receive,
    ) -> Tensor:
        shape = list(layer.normalized_shape)
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, layer.eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.shape, ctx.receive = weight, bias, shape, receive
        ctx.widths, ctx.eps = len(shape), layer.eps
        ctx.clipped = [parameter for parameter in (weight, bias) if parameter is not None]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, mean, rstd = ctx.saved_tensors
        input_gradient = None
        if ctx.needs_input_grad[0] and torch.is_grad_enabled():
            input_gradient = differentiate_again(
                lambda x: functional.layer_norm(x, ctx.shape, eps=ctx.eps),
                *(x, scale_gradient(g, ctx.weight, ctx.receive)),
            )
        elif ctx.needs_input_grad[0]:
            input_gradient = torch.ops.aten.native_layer_norm_backward(
                g, x, ctx.shape, mean, rstd, ctx.weight, ctx.bias, [True, False, False]
            )[0]
        axes = len(ctx.shape)
        flat = [_flatten(t.flatten(-axes)) for t in (x.detach(), mean, rstd, g)]
        contributions: list[tuple[nn.Parameter, Contribution]] = []
        beside = BesideScale(is_shifted=all(ctx.needs_input_grad[1:3]))
        if ctx.needs_input_grad[1]:
            contributions.append((ctx.weight, Scale(flat[0], flat[1], flat[2], flat[3], beside)))
        if ctx.needs_input_grad[2]:
            contributions.append((ctx.bias, Shift(flat[3], beside)))
        ctx.receive(contributions, may_repeat=True)
        return input_gradient, None, None, None, None


class RmsFormula(NamedTuple):
    """The formula of an RMS norm."""

    eps: float
    axes: tuple[int, ...]
    is_shifted: bool = False  # whether the scale is 1 + w, as in Gemma, and not w
    casts_first: bool = False  # Llama casts 16-bit inputs back before they are scaled

    def scale_of(self, weight: Tensor) -> Tensor:
        """Return what normalised inputs are multiplied by."""
        if not self.is_shifted:
            return weight
        return 1.0 + (weight if self.casts_first else _at_least_float32(weight))


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def normalise_and_scale(x: Tensor, weight: Tensor, formula: RmsFormula) -> tuple[Tensor, Tensor]:
    """Return an RMS norm, and the reciprocal root mean squares; the axes stay, of length 1."""
    exact = _at_least_float32(x)
    rstd = exact.square().mean(formula.axes, keepdim=True).add_(formula.eps).rsqrt_()
    y = exact * rstd
    scale = formula.scale_of(weight)
    if formula.casts_first:
        y = y.to(x.dtype)
    # In place it would round to the dtype of y.
    y = y.mul_(scale) if torch.result_type(y, scale) == y.dtype else y * scale
    return (y if formula.casts_first else y.to(x.dtype)), rstd


class RmsNorm(torch.autograd.Function):
    """Divide the last axes by their root mean square, and scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, formula: RmsFormula, receive: Receive
    ) -> Tensor:
        """Run it."""
        y, rstd = normalise_and_scale(x, weight, formula)
        ctx.save_for_backward(x, rstd)
        ctx.weight, ctx.formula, ctx.receive, ctx.clipped = weight, formula, receive, [weight]
        ctx.widths = len(formula.axes)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Differentiate it, and pass on what the scale contributes."""
        x, rstd = ctx.saved_tensors
        formula: RmsFormula = ctx.formula
        input_gradient = None
        if ctx.needs_input_grad[0] and torch.is_grad_enabled():
            ones = torch.zeros_like if formula.is_shifted else torch.ones_like
            scaled = scale_gradient(g, ctx.weight, ctx.receive, formula.scale_of)
            input_gradient = differentiate_again(
                lambda x: normalise_and_scale(x, ones(ctx.weight.detach()), formula)[0],
                *(x, scaled),
            )
        elif ctx.needs_input_grad[0]:
            scaled = g * _at_least_float32(formula.scale_of(ctx.weight))
            normal = x * rstd
            common = (scaled * normal).mean(formula.axes, keepdim=True)
            input_gradient = scaled.addcmul_(normal, common, value=-1).mul_(rstd).to(x.dtype)
        contributions: list[tuple[nn.Parameter, Contribution]] = []
        if ctx.needs_input_grad[1]:
            axes = len(formula.axes)
            flat_x, flat_rstd, flat_g = (_flatten(t.flatten(-axes)) for t in (x.detach(), rstd, g))
            beside = BesideScale(is_shifted=False)
            contributions.append((ctx.weight, Scale(flat_x, None, flat_rstd, flat_g, beside)))
        ctx.receive(contributions, may_repeat=True)
        return input_gradient, None, None, None


def run_linear(layer: nn.Linear, receive: Receive, input: Tensor) -> Tensor:  # noqa: A002 (torch's)
    """Run a linear layer, in autocast's dtype under autocast."""
    return multiply(input, layer.weight, layer.bias, receive=receive)


def run_conv1d(layer: Any, receive: Receive, x: Tensor) -> Tensor:
    """Run GPT-2's Conv1D, a linear layer whose weight is (d, p)."""
    return multiply(x, layer.weight, layer.bias, receive=receive, transposed=True)


def multiply(
    input: Tensor,  # noqa: A002 (torch's)
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    receive: Receive,
    transposed: bool = False,
) -> Tensor:
    """Run ``functional.linear`` with parameters that are clipped, or its like with (d, p)."""
    # Autocast leaves complex numbers alone. A sparse input has an exact gradient as a dense one.
    x = input.to_dense() if is_sparse(input) else input
    dtype = None if x.is_complex() else autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)
    return apply(_Linear, x, weight, bias, transposed, receive)


def run_embedding(layer: nn.Embedding, receive: Receive, input: Tensor) -> Tensor:  # noqa: A002
    """Run a lookup, of samples or once for all of them (``broadcasts``)."""
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    return apply(_Embedding, input.long(), layer.weight, padding, receive)  # ids may be int32


def run_layer_norm(layer: nn.LayerNorm, receive: Receive, input: Tensor) -> Tensor:  # noqa: A002
    """Run a layer norm, in float32 under CUDA's autocast."""
    x = cast_for_normalisation(input)
    return apply(_LayerNorm, x, layer.weight, layer.bias, layer, receive)


def run_rms_norm(layer: nn.RMSNorm, receive: Receive, x: Tensor) -> Tensor:
    """Run an RMS norm, in float32 under CUDA's autocast."""
    x = cast_for_normalisation(x)
    axes = tuple(range(-len(layer.normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    return apply(RmsNorm, x, layer.weight, RmsFormula(eps, axes), receive)
