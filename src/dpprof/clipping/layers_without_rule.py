"""Layers without a rule: ``torch.func`` computes their per-sample gradients, as in Opacus."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpprof.clipping.batch_axis import Settings, is_second
from dpprof.clipping.contributions import SampleGradients
from dpprof.clipping.layers import Receive, apply, as_own, autocast_dtype
from dpprof.clipping.patching import PatchedLayer
from dpprof.norms.tiles import accumulator_of
from dpprof.spec.registry import UnsupportedError

_SAME = {torch.float64: 1e-8, torch.float32: 1e-3}
"""By how much of its norm a sample's output may differ when it is computed again, to rounding."""

_SAME_IN_16_BITS = 2.0**-5

_ORDER = ("first", "second")


class _Call(nn.Module):
    """One call of a layer's original ``forward``, to be repeated with other tensors.

    It is a module because ``functional_call`` needs one.

    Args:
        layer: The layer.
        arguments: Positional and keyword arguments, flattened.
        structure: How to unflatten them.
        axis: The axis of the batch, in tensors and in the output.
    """

    def __init__(
        self, layer: PatchedLayer, arguments: Sequence[Any], structure: Any, axis: int
    ) -> None:
        super().__init__()
        self.layer, self._structure, self.axis = layer, structure, axis
        self._places = [at for at, one in enumerate(arguments) if isinstance(one, Tensor)]
        self._arguments = [None if isinstance(one, Tensor) else one for one in arguments]
        self.autocast = autocast_dtype(arguments[self._places[0]])
        self.names = [name for name, _ in self.named_parameters()]

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        """Run the layer on other tensors."""
        flat = list(self._arguments)
        for place, tensor in zip(self._places, tensors, strict=True):
            flat[place] = tensor
        inputs, named = pytree.tree_unflatten(flat, self._structure)
        return self.layer.original.forward(self.layer, *inputs, **named)

    def run_with(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """Run it with other parameters too."""
        state = dict(zip(self.names, parameters, strict=True))
        return torch.func.functional_call(self, state, (tensors,))


class _AnyLayer(torch.autograd.Function):
    """Any layer; its backward materialises the per-sample gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, receive: Receive, *tensors: Tensor) -> Any:
        count = len(call.names)
        ctx.save_for_backward(*tensors[count:])
        ctx.clipped, ctx.call, ctx.receive = tensors[:count], call, receive
        y = call.forward(tensors[count:])
        name = type(call.layer).__name__
        if not isinstance(y, Tensor):
            raise UnsupportedError(f"{name} has no rule and does not return a tensor")
        axis = call.axis
        if y.dim() <= axis or y.shape[axis] != tensors[-1].shape[axis]:
            raise ValueError(
                f"{name} has no rule, so the {_ORDER[axis]} axis of what it returns must be the "
                f"batch; it got {tuple(tensors[-1].shape)} and returned {tuple(y.shape)}; name it "
                "in batch_second if its second axis is, or freeze its parameters"
            )
        held = {one.untyped_storage()._cdata for one in tensors}  # noqa: SLF001 (no public name)
        # In-place code after the layer must not reach the inputs of the layer.
        y = y.clone() if y.untyped_storage()._cdata in held else as_own(y)  # noqa: SLF001
        ctx.projected_B = _project(y.transpose(0, axis)) if any(ctx.needs_input_grad) else None
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        call: _Call = ctx.call
        count, axis = len(call.names), call.axis
        inputs = ctx.saved_tensors
        needed = [i for i in range(len(inputs)) if ctx.needs_input_grad[2 + count + i]]

        def differentiate(*sample: Tensor) -> Any:
            *xs, g_b = sample

            def run(parameters: Sequence[Tensor], differentiated: Sequence[Tensor]) -> Tensor:
                batch = [x.unsqueeze(axis) for x in xs]
                for i, x in zip(needed, differentiated, strict=True):
                    batch[i] = x.unsqueeze(axis)
                y: Tensor = call.run_with(parameters, batch)
                return y.select(axis, 0)

            y, pull_back, *_ = torch.func.vjp(run, list(ctx.clipped), [xs[i] for i in needed])
            return *pull_back(g_b.to(y.dtype)), y

        with torch.autocast(g.device.type, dtype=call.autocast, enabled=call.autocast is not None):
            parts = [_make_contiguous(part.transpose(0, axis)) for part in (*inputs, g)]
            if call.autocast is not None:
                # vmap of a group norm's backward with float32 weights accepts no other inputs.
                parts = [part.float() if part.dtype == call.autocast else part for part in parts]
            of_parameters, of_inputs, y = _map_over_samples(differentiate, call, *parts)
        changed_B = _differs(y, ctx.projected_B, g.dtype)
        del y
        contributions = [
            (parameter, SampleGradients(gradients))
            for parameter, gradients in zip(ctx.clipped, of_parameters, strict=True)
            if parameter.requires_grad
        ]
        ctx.receive(contributions, changed_B)
        found = {
            i: one.transpose(0, axis).to(inputs[i].dtype)
            for i, one in zip(needed, of_inputs, strict=True)
        }
        return None, None, *[None] * count, *[found.get(i) for i in range(len(inputs))]


def _flatten(y: Tensor) -> Tensor:
    return y.flatten(1) if y.dim() > 1 else y[:, None]


def _project(y: Tensor) -> Tensor:
    """Project each sample's output onto one vector, which is no multiple of a likely one; (B,)."""
    with torch.autocast(y.device.type, enabled=False):
        flat = _flatten(y.detach()).to(accumulator_of(y.dtype))
        places = torch.arange(flat.shape[1], device=y.device, dtype=flat.dtype)
        projected_B: Tensor = flat @ places.mul_(0.7).sin_()
        return projected_B


def _differs(y: Tensor, projected_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Tell which samples have another output than the one of ``dtype`` that was projected; (B,)."""
    limit = _SAME.get(dtype, _SAME_IN_16_BITS)
    moved_B = (_project(y) - projected_B).abs()
    is_same_B = moved_B <= limit * torch.linalg.vector_norm(_flatten(y), dim=1)
    changed_B: Tensor = ~is_same_B & projected_B.isfinite()
    return changed_B


def _make_contiguous(x: Tensor) -> Tensor:
    """Give a tensor the strides of its shape: vmap of a convolution of one token requires them."""
    strides = torch.empty(x.shape, device="meta").stride()
    return x if x.stride() == strides else x.clone(memory_format=torch.contiguous_format)


def _map_over_samples(function: Callable[..., Any], call: _Call, *tensors: Tensor) -> Any:
    try:
        return torch.func.vmap(function)(*tensors)
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise UnsupportedError(
            f"{type(call.layer).__name__} has no rule and draws random numbers, which differ when "
            "its per-sample gradients are computed; move them to a layer without parameters"
        ) from error


def run_any_layer(layer: nn.Module, receive: Receive, *inputs: Any, **named: Any) -> Tensor:
    """Run a patched layer that has no rule, with the batch on the first axis."""
    return run_any_layer_on((), layer, receive, *inputs, **named)


def run_any_layer_on(
    settings: Settings, layer: nn.Module, receive: Receive, *inputs: Any, **named: Any
) -> Tensor:
    """Run a patched layer that has no rule, with the batch where ``settings`` say.

    Raises:
        UnsupportedError: It gets no tensor, or a layer, or returns something else than a tensor.
        ValueError: Its tensors disagree in the length of their first axis.
    """
    arguments, structure = pytree.tree_flatten((inputs, named))
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    name = type(layer).__name__
    if any(isinstance(one, nn.Module) for one in arguments):
        raise UnsupportedError(
            f"{name} has no rule and gets another layer, whose gradients would be lost; freeze the "
            "parameters"
        )
    if not tensors:
        raise UnsupportedError(f"{name} has no rule and gets no tensor, so it has no samples")
    axis = int(is_second(layer, settings))
    if len({one.shape[axis : axis + 1] for one in tensors}) > 1 or tensors[0].dim() <= axis:
        shapes = ", ".join(str(tuple(one.shape)) for one in tensors)
        raise ValueError(
            f"{name} has no rule, so the {_ORDER[axis]} axis of each tensor that it gets must be "
            f"the batch; it got {shapes}"
        )
    assert isinstance(layer, PatchedLayer)
    call = _Call(layer, arguments, structure, axis)
    return apply(_AnyLayer, call, receive, *call.parameters(), *tensors)
