"""Rules of group and instance norms, and of root mean square norms of any class.

The scale and shift of a group norm have a number for each channel. To normalise B samples of G
groups is to normalise one sample of B G groups, whose B C channels have scales and shifts of their
own. So one call of PyTorch's backward gives the gradient of the input, and those of every sample's
scales and shifts, at the cost of an ordinary backward.

Most architectures have an RMS norm of their own. They differ in the name of their epsilon, in
whether the scale is w or 1 + w, and in when 16-bit inputs are cast back. A layer that may be one
runs on random inputs of two to four axes; if it gives the formula's values bit by bit, it takes the
rule of RMS norms for inputs like these, and runs as a layer without a rule on others. The rule is
then both forward and backward, so a layer that would differ on other inputs is still clipped
exactly.

Shape legend: B samples, C channels, G groups, (...) axes of space, T tokens, d width.
"""

import inspect
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from dpprof.private.contributions.contributions import Receive
from dpprof.private.contributions.sample_gradients import SampleGradients
from dpprof.private.layers.batch_axis import Settings, run_tokenwise
from dpprof.private.layers.layers import (
    RmsFormula,
    RmsNorm,
    apply,
    cast_for_normalisation,
    differentiate_again,
    normalise_and_scale,
    scale_gradient,
)
from dpprof.private.layers.layers_without_rule import run_any_layer_on
from dpprof.private.norms import placement
from dpprof.private.refusals.calls import is_setting

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of axes


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
    """Run an instance norm, of a batch: a group norm with a channel in each group."""
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


_PROBES = (
    (torch.float32, torch.float32, 0.0),
    (torch.bfloat16, torch.bfloat16, 0.0),
    (torch.bfloat16, torch.float32, 0.0),
    (torch.float16, torch.float32, 0.0),
    (torch.float64, torch.float64, 1e-6),
)
"""The dtypes of input and scale on which values must be equal, to a relative tolerance.

Many layers compute in float32 even for float64; the rule does not.
"""

_AROUND = ((), (2,), (2, 2))  # the axes before the last two of the inputs that are tried
_AXES = range(2, 2 + len(_AROUND))  # how many these inputs have

_recognised: dict[tuple[object, ...], "Recognised | None"] = {}  # by class, width, attributes

_OF_MODULES = frozenset(vars(nn.Module()))


class Recognised(NamedTuple):
    """A layer's formula, by the names of its attributes."""

    scale: str
    eps: str
    is_shifted: bool
    casts_first: bool

    def run(self, layer: nn.Module, receive: Receive, *inputs: Any, **named: Any) -> Any:
        """Run the layer with the batch on the first axis."""
        return self.run_on((), layer, receive, *inputs, **named)

    def run_on(
        self, settings: Settings, layer: nn.Module, receive: Receive, *inputs: Any, **named: Any
    ) -> Any:
        """Run the layer by the rule of RMS norms on inputs like those tried, else without one."""
        arguments, scale = (*inputs, *named.values()), getattr(layer, self.scale)
        x = arguments[0] if len(arguments) == 1 else None
        if not isinstance(x, Tensor) or x.dim() not in _AXES or x.shape[-1] != len(scale):
            return run_any_layer_on(settings, layer, receive, *inputs, **named)

        def normalise(_: nn.Module, receive: Receive, x: Tensor) -> Tensor:
            return apply(RmsNorm, x, scale, self.read(layer), receive)

        if not settings:
            return normalise(layer, receive, x)
        return run_tokenwise(normalise, 1, settings, layer, receive, x)

    def read(self, layer: nn.Module) -> RmsFormula:
        """Return the formula with the layer's present epsilon."""
        return RmsFormula(getattr(layer, self.eps), (-1,), self.is_shifted, self.casts_first)


def recognise(layer: nn.Module) -> Recognised | None:
    """Return the formula of an RMS norm of the last axis; None if a layer is something else.

    It must have one parameter, a vector, no buffers and no children, get nothing but its input, and
    have its epsilon as an attribute. Layers of one class whose attributes are the same, and plain
    or tuples of plain ones, compute the same; any other is tried by itself.
    """
    own = [(name, p) for name, p in layer._parameters.items() if p is not None]  # noqa: SLF001
    if len(own) != 1 or own[0][1].dim() != 1 or [*layer.children(), *layer.buffers()]:
        return None
    if len(inspect.signature(layer.forward).parameters) != 1:
        return None
    name, weight = own[0]
    names = [key for key, value in vars(layer).items() if type(value) is float]
    formulas = [
        Recognised(name, eps, is_shifted, casts_first)
        for eps in names
        for is_shifted in (False, True)
        for casts_first in (False, True)
    ]
    if not formulas:
        return None
    # Frameworks name what they attach to any module so.
    attributes = {k: v for k, v in vars(layer).items() if k[:2] != "__" and k not in _OF_MODULES}
    if not all(map(_is_plain, attributes.values())):
        return _find(layer, formulas)
    key = (type(layer), len(weight), repr(attributes))  # 1, 1.0 and True are equal
    if key not in _recognised:
        _recognised[key] = _find(layer, formulas)
    return _recognised[key]


def _find(layer: nn.Module, formulas: Sequence[Recognised]) -> Recognised | None:
    """Find the formula that a layer computes; None if it is none of these."""
    with (  # real numbers in full precision, unseen by any mode
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),  # noqa: SLF001
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
    ):
        cases = list(itertools.product(_PROBES, _AROUND, (False, True)))  # in training too
        return next(
            (f for f in formulas if all(_computes(layer, f, *case) for case in cases)), None
        )


def _is_plain(value: object) -> bool:
    """Tell whether an attribute is plain, or a tuple of such."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else is_setting(value)


def _computes(
    layer: nn.Module,
    formula: Recognised,
    probe: tuple[torch.dtype, torch.dtype, float],
    around: tuple[int, ...],
    training: bool,
) -> bool:
    """Tell whether a layer computes a formula."""
    of_input, of_scale, tolerance = probe
    d = len(getattr(layer, formula.scale))
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32)
    sizes_T1 = 10.0 ** torch.arange(-4, 3)[:, None].float()  # epsilon counts in the small ones
    x = (draw(*around, len(sizes_T1), d) * sizes_T1).to(of_input)
    scale_d = draw(d).to(of_scale)
    expected, _ = normalise_and_scale(x, scale_d, formula.read(layer))
    # A double runs the layer's code without its hooks, and leaves no trace in the layer.
    double = object.__new__(type(layer))
    parameters = {formula.scale: nn.Parameter(scale_d, requires_grad=False)}
    vars(double).update(vars(layer), _parameters=parameters, training=training)
    try:
        computed = double.forward(x)
    except Exception:  # noqa: BLE001 (any code may run here)
        return False
    is_like = isinstance(computed, Tensor) and computed.shape == expected.shape
    return (
        is_like
        and computed.dtype == expected.dtype
        and torch.allclose(computed, expected, rtol=tolerance, atol=0)
    )
