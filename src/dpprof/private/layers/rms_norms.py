"""Recognises a root mean square norm by its values, whatever the name of its class.

Most architectures have an RMS norm of their own. They differ in the name of their epsilon, in
whether the scale is w or 1 + w, and in when 16-bit inputs are cast back. A layer that may be one
runs on random inputs; if it gives the formula's values bit by bit, it takes the rule of RMS norms.
The rule is then both its forward and its backward, so a layer that would differ on other inputs is
still clipped exactly.

Shape legend: B samples, T tokens, d width.
"""

import inspect
import itertools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from dpprof.private.contributions.contributions import Receive
from dpprof.private.layers.layers import RmsFormula, RmsNorm, apply, normalise_and_scale
from dpprof.private.refusals.calls import read_settings

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

_recognised: dict[tuple[object, ...], "Recognised | None"] = {}
"""The formulas that were found, by class, width, and the plain attributes of a layer."""


class Recognised(NamedTuple):
    """A layer's formula, by the names of its attributes."""

    scale: str
    eps: str
    is_shifted: bool
    casts_first: bool

    def run(self, layer: nn.Module, receive: Receive, *inputs: Any, **named: Any) -> Tensor:
        """Run the layer by the rule of RMS norms, in the dtypes of its formula."""
        (x,) = (*inputs, *named.values())
        return apply(RmsNorm, x, getattr(layer, self.scale), self.read(layer), receive)

    def read(self, layer: nn.Module) -> RmsFormula:
        """Return the formula with the layer's present epsilon."""
        return RmsFormula(getattr(layer, self.eps), (-1,), self.is_shifted, self.casts_first)


def recognise(layer: nn.Module) -> Recognised | None:
    """Return the formula of an RMS norm of the last axis; None if a layer is something else.

    It must have one parameter, a vector, no buffers and no children, get nothing but its input, and
    have its epsilon as an attribute.
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
    key = (type(layer), len(weight), *read_settings(vars(layer)).items())
    if key not in _recognised:
        with (  # real numbers in full precision, unseen by any mode
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),  # noqa: SLF001
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
        ):
            cases = list(itertools.product(_PROBES, (False, True)))  # in evaluation, in training
            _recognised[key] = next(
                (f for f in formulas if all(_computes(layer, f, *case) for case in cases)), None
            )
    return _recognised[key]


def _computes(
    layer: nn.Module,
    formula: Recognised,
    probe: tuple[torch.dtype, torch.dtype, float],
    training: bool,
) -> bool:
    """Tell whether a layer computes a formula."""
    of_input, of_scale, tolerance = probe
    d = len(getattr(layer, formula.scale))
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32)
    sizes_T1 = 10.0 ** torch.arange(-4, 3)[:, None].float()  # epsilon counts in the small ones
    x_BTd = draw(2, len(sizes_T1), d) * sizes_T1
    x_BTd, scale_d = x_BTd.to(of_input), draw(d).to(of_scale)
    expected, _ = normalise_and_scale(x_BTd, scale_d, formula.read(layer))
    # A double runs the layer's code without its hooks, and leaves no trace in the layer.
    double = object.__new__(type(layer))
    parameters = {formula.scale: nn.Parameter(scale_d, requires_grad=False)}
    vars(double).update(vars(layer), _parameters=parameters, training=training)
    try:
        computed = double.forward(x_BTd)
    except Exception:  # noqa: BLE001 (any code may run here)
        return False
    is_like = isinstance(computed, Tensor) and computed.shape == expected.shape
    return (
        is_like
        and computed.dtype == expected.dtype
        and torch.allclose(computed, expected, rtol=tolerance, atol=0)
    )
