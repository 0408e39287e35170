"""Layers without a rule: ``torch.func`` computes their per-sample gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpprof.clipping.contributions import Whole
from dpprof.clipping.layers import Forward, Use, _apply, _autocast_dtype
from dpprof.spec.registry import UnsupportedError


class _Call(NamedTuple):
    """A call of a layer without a rule."""

    layer: nn.Module
    run: Callable[..., Any]
    """The layer's own ``forward``, as a function of the layer and its arguments."""

    names: Sequence[str]
    """Of its parameters."""

    arguments: Sequence[Any]
    """Positional and named ones, flat; tensors are filled in."""

    structure: Any
    places: Sequence[int]
    """Where in ``arguments`` tensors go."""

    autocast: torch.dtype | None

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """Run the layer on the tensors given."""
        flat = list(self.arguments)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
        inputs, named = pytree.tree_unflatten(flat, self.structure)
        return self.run(self.layer, *inputs, **named)

    def with_parameters(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """Run the layer with other parameters than its own."""
        state = {f"layer.{name}": one for name, one in zip(self.names, parameters, strict=True)}
        return torch.func.functional_call(_Caller(self), state, (tensors,))


class _Caller(nn.Module):
    """Calls a layer past the rule that is in place; ``functional_call`` wants a module."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.layer, self._call = call.layer, call

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        return self._call.with_tensors(tensors)


class _Other(torch.autograd.Function):
    """Any layer, whose per-sample gradients ``torch.func`` makes."""

    @staticmethod
    def forward(ctx: Any, call: _Call, use: Use, *tensors: Tensor) -> Any:
        count = len(call.names)
        ctx.save_for_backward(*tensors[count:])
        ctx.clipped, ctx.call, ctx.use = tensors[:count], call, use
        y = call.with_tensors(tensors[count:])
        if not isinstance(y, Tensor):
            name = type(call.layer).__name__
            raise UnsupportedError(f"{name} returns no tensor, and has no rule")
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        call: _Call = ctx.call
        count = len(call.names)
        inputs = ctx.saved_tensors
        needed = [i for i in range(len(inputs)) if ctx.needs_input_grad[2 + count + i]]

        def of_sample(*given: Tensor) -> Any:
            *xs, g_b = given

            def run(parameters: Sequence[Tensor], differentiated: Sequence[Tensor]) -> Tensor:
                whole = [x[None] for x in xs]
                for i, x in zip(needed, differentiated, strict=True):
                    whole[i] = x[None]
                y: Tensor = call.with_parameters(parameters, whole)
                return y[0]

            pulled = torch.func.vjp(run, list(ctx.clipped), [xs[i] for i in needed])
            y, pull_back = pulled[0], pulled[1]
            return pull_back(g_b.to(y.dtype))

        with torch.autocast(g.device.type, dtype=call.autocast, enabled=call.autocast is not None):
            parts = [_in_order(part) for part in (*inputs, g)]
            if call.autocast is not None:
                # Beside float32 weights vmap of a group norm's backward takes no other inputs.
                parts = [part.float() if part.dtype == call.autocast else part for part in parts]
            of_parameters, of_inputs = _for_each_sample(of_sample, call.layer, *parts)
        ctx.use.hand_over(
            [
                (parameter, Whole(gradients))
                for parameter, gradients in zip(ctx.clipped, of_parameters, strict=True)
                if parameter.requires_grad
            ]
        )
        found = {i: one.to(inputs[i].dtype) for i, one in zip(needed, of_inputs, strict=True)}
        return None, None, *[None] * count, *[found.get(i) for i in range(len(inputs))]


def _in_order(x: Tensor) -> Tensor:
    """Have the strides that the shape alone says: vmap of a convolution insists, for one token."""
    plain = torch.empty(x.shape, device="meta").stride()
    return x if x.stride() == plain else x.clone(memory_format=torch.contiguous_format)


def _for_each_sample(of_sample: Callable[..., Any], layer: nn.Module, *tensors: Tensor) -> Any:
    try:
        return torch.func.vmap(of_sample)(*tensors)
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise UnsupportedError(
            f"{type(layer).__name__} draws random numbers and has no rule, so its gradient cannot "
            "be computed again for each sample; put what is random into a layer without parameters"
        ) from error


def run_other(layer: nn.Module, use: Use) -> Forward:
    """Run a layer that has no rule; each sample's gradient is made, as Opacus's functorch does."""
    run = type(layer).forward
    name = type(layer).__name__

    def forward(*inputs: Any, **named: Any) -> Tensor:
        arguments, structure = pytree.tree_flatten((inputs, named))
        places = [at for at, one in enumerate(arguments) if isinstance(one, Tensor)]
        tensors = [arguments[at] for at in places]
        if not tensors:
            raise UnsupportedError(f"{name} is given no tensor, so it has no samples to tell apart")
        if len({one.shape[:1] for one in tensors}) > 1 or not tensors[0].dim():
            shapes = ", ".join(str(tuple(one.shape)) for one in tensors)
            raise ValueError(
                f"{name} has no rule, so the first axis of each tensor that it is given must be "
                f"the batch; it was given {shapes}"
            )
        parameters = dict(layer.named_parameters())
        rest = [None if isinstance(one, Tensor) else one for one in arguments]
        call = _Call(
            layer, run, list(parameters), rest, structure, places, _autocast_dtype(tensors[0])
        )
        return _apply(_Other, call, use, *parameters.values(), *tensors)

    return forward
