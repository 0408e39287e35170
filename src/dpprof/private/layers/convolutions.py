"""Rules of convolutions and transposed ones, of one, two and three axes of space.

Shape legend: B samples, C channels of the input, O of the output, (...) axes of space.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpprof.private.contributions.contributions import Contribution, Convolution, Receive
from dpprof.private.contributions.sample_gradients import SampleGradients, Shift
from dpprof.private.layers.layers import apply, autocast_dtype, cast_weight
from dpprof.private.norms.convolution import Kernel, differentiate_input
from dpprof.private.norms.tiles import accumulator_of


class _Options(NamedTuple):
    """The options of ``torch.convolution``, in its order."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def places_read(self, weight: Tensor) -> tuple[slice, ...] | None:
        """Return the places of the input that a kernel of one element reads, if it skips some."""
        has_one_element = weight[0, 0].numel() == 1 and not any(self.padding)
        if self.transposed or not has_one_element or max(self.stride) == 1:
            return None
        return (slice(None), slice(None), *(slice(None, None, step) for step in self.stride))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes them so)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: _Options,
        receive: Receive,
    ) -> Tensor:
        ctx.shape, ctx.places = x.shape, options.places_read(weight)
        if ctx.places is not None:
            x, options = x[ctx.places], options._replace(stride=(1,) * len(options.stride))
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.options, ctx.receive = weight, bias, options, receive
        ctx.clipped = [weight] if bias is None else [weight, bias]
        own_bias = None if bias is None else bias.to(x.dtype)
        return torch.convolution(x, cast_weight(weight, x), own_bias, *options)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        contributions: list[tuple[nn.Parameter, Contribution]] = []
        if ctx.needs_input_grad[1]:
            contributions.append((ctx.weight, _contribute(x.detach(), g, ctx.weight, ctx.options)))
        if ctx.needs_input_grad[2]:
            contributions.append((ctx.bias, Shift(g.flatten(2).transpose(1, 2))))
        ctx.receive(contributions, may_repeat=not g.is_complex())
        input_gradient = None
        if ctx.needs_input_grad[0] and not g.shape[2:].numel():  # PyTorch refuses no places
            input_gradient = x.new_zeros(ctx.shape)
        elif ctx.needs_input_grad[0]:
            repeats = torch.is_grad_enabled() and not g.is_complex()
            if repeats:
                input_gradient = _run_back(ctx, x, g)
            else:
                input_gradient = differentiate_input(x, g, ctx.weight.to(g.dtype), ctx.options)
            if ctx.places is not None:
                places_gradient = input_gradient
                input_gradient = places_gradient.new_zeros(ctx.shape)
                input_gradient[ctx.places] = places_gradient
        return input_gradient, None, None, None, None


def _run_back(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    """Compute the gradient of the input by another convolution, whose weight is clipped too."""
    options: _Options = ctx.options
    places = tuple(x.shape[2:])
    more = [0] * len(places)
    if not options.transposed:
        axes = zip(places, g.shape[2:], *options[:3], ctx.weight.shape[2:], strict=True)
        more = [x - ((n - 1) * s - 2 * p + d * (k - 1) + 1) for x, n, s, p, d, k in axes]
    back = options._replace(transposed=not options.transposed, output_padding=tuple(more))
    input_gradient = apply(_Convolution, g, ctx.weight, None, back, ctx.receive)
    return input_gradient[(slice(None), slice(None), *map(slice, places))]


def _contribute(x: Tensor, g: Tensor, weight: Tensor, options: _Options) -> Contribution:
    if not g.shape[2:].numel():
        zeros = g.new_zeros(len(g), *weight.shape, dtype=accumulator_of(g.dtype))
        return SampleGradients(zeros)
    stride, padding, dilation, transposed, output_padding, groups = options
    kernel = Kernel(tuple(weight.shape), stride, padding, dilation, groups)
    if not transposed:
        return Convolution(x, g, kernel)
    if any(more >= s for more, s in zip(output_padding, stride, strict=True)):
        # The convolution of g would have more places than x has.
        sides = [(p, p - more) for p, more in zip(padding, output_padding, strict=True)]
        g = functional.pad(g, [side for axis in reversed(sides) for side in axis])
        kernel = kernel._replace(padding=(0,) * len(stride))
    return Convolution(g, x, kernel, transposed=True)


def run_convolution(layer: Any, receive: Receive, input: Tensor) -> Tensor:  # noqa: A002 (torch's)
    """Run a convolution in autocast's dtype; ``ValueError`` if its input has no batch axis."""
    x, padding = input, layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        sides = layer._reversed_padding_repeated_twice  # noqa: SLF001 (it has no public name)
        padding = tuple(sides[-2::-2])
        if layer.padding_mode != "zeros" or sides[::2] != sides[1::2]:
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            _verify_axes(layer, x)
            x, padding = functional.pad(x, sides, mode=mode), (0,) * len(padding)
    return _run(layer, receive, x, padding, transposed=False, output_padding=0)


def run_transposed_convolution(
    layer: Any,
    receive: Receive,
    input: Tensor,  # noqa: A002 (torch's)
    output_size: Sequence[int] | None = None,
) -> Tensor:
    """Run a transposed convolution, as ``run_convolution`` does."""
    options = (layer.stride, layer.padding, layer.kernel_size, len(layer.stride), layer.dilation)
    more = layer._output_padding(input, output_size, *options)  # noqa: SLF001 (it has no public name)
    return _run(layer, receive, input, layer.padding, transposed=True, output_padding=more)


def _run(
    layer: Any,
    receive: Receive,
    x: Tensor,
    padding: int | Sequence[int],
    *,
    transposed: bool,
    output_padding: int | Sequence[int],
) -> Tensor:
    _verify_axes(layer, x)
    settings = (layer.stride, padding, layer.dilation, output_padding)
    n = x.dim() - 2
    stride, padding, dilation, output_padding = (
        (setting,) * n if isinstance(setting, int) else tuple(setting) for setting in settings
    )
    options = _Options(stride, padding, dilation, transposed, output_padding, layer.groups)
    dtype = autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)
    return apply(_Convolution, x, layer.weight, layer.bias, options, receive)


def _verify_axes(layer: Any, x: Tensor) -> None:
    expected = layer.weight.dim()
    if x.dim() != expected:
        raise ValueError(
            f"{type(layer).__name__} got an input of shape {tuple(x.shape)}; clipping needs "
            f"{expected} axes, samples and channels first, so give it a batch axis"
        )
