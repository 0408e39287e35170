"""Runs layers without a rule; backward runs them again on each sample alone (``reruns``).

Memory: B times the layer's trained parameters, for their per-sample gradients; ``FlashClipping``
frees these after each layer.

Shape legend: B samples.
"""

import enum
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpprof.private.contributions.contributions import Receive, storage_of
from dpprof.private.contributions.sample_gradients import SampleGradients
from dpprof.private.errors import BatchAxisError, UnsupportedError
from dpprof.private.layers.batch_axis import Settings, is_second
from dpprof.private.layers.layers import apply, as_own
from dpprof.private.layers.patching import PatchedLayer
from dpprof.private.layers.reruns import (
    Call,
    Rerun,
    has_gradient,
    project,
    shapes_of,
    turn,
    with_gradients,
)
from dpprof.private.norms.complex_numbers import interleave
from dpprof.private.refusals.tensor_kinds import refuse_inputs

_TENSOR = object()  # the mark in place of a tensor that a layer returned


class _AnyLayer(torch.autograd.Function):
    """Any layer; its backward materialises the per-sample gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, receive: Receive, *tensors: Tensor) -> Any:
        count = len(call.trained)
        ctx.save_for_backward(*tensors[count:])
        ctx.clipped, ctx.call, ctx.receive = tensors[:count], call, receive
        ctx.samples = None  # ``layout`` sets on how many it runs; 0 where that is unproven, and why
        versions = versions_of(tensors)
        values, structure = pytree.tree_flatten(call.forward(tensors[count:]))
        if versions_of(tensors) != versions:
            raise UnsupportedError(
                f"{call.name} has no rule and changes its inputs in place; change copies, or "
                "freeze its parameters"
            )
        held = {storage_of(tensor) for tensor in tensors}
        outputs = []
        for i, y in enumerate(values):
            if isinstance(y, Tensor):
                # In-place code after the layer must reach neither its inputs nor other outputs.
                outputs.append(y.clone() if storage_of(y) in held else as_own(y))
                held.add(storage_of(outputs[-1]))
                values[i] = _TENSOR
        real = with_gradients(outputs)
        if not real or not all(y.dim() for y in real):
            raise UnsupportedError(
                f"{call.name} has no rule and returns {'a number' if real else 'no tensor'}, which "
                "has no samples; freeze its parameters"
            )
        call.returned = values, structure
        ctx.mark_non_differentiable(*(y for y in outputs if not has_gradient(y)))
        ctx.real = [i for i, y in enumerate(outputs) if has_gradient(y)]
        ctx.why = ""
        ctx.projected = [project(y) for y in real] if any(ctx.needs_input_grad) else None
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> Any:
        call: Call = ctx.call
        count = len(call.trained)
        inputs = ctx.saved_tensors
        needed = [i for i in range(len(inputs)) if ctx.needs_input_grad[2 + count + i]]
        gs = [of_outputs[i] for i in ctx.real]
        samples = len(gs[0]) if ctx.samples is None else ctx.samples
        if (samples == 0 and len(gs[0])) or any(len(g) % max(samples, 1) for g in gs):
            raise BatchAxisError(
                f"{call.name} has no rule and returned {shapes_of(gs)}, whose first axis is not "
                f"proven to have rows of each sample{ctx.why and f' ({ctx.why})'}; name a module "
                "around it that gets and returns samples in as_one=[...], or freeze its parameters"
            )
        run = Rerun(call, ctx.clipped, inputs, needed, gs, samples)
        of_parameters, of_inputs, changed_B = run.find(ctx.projected)
        contributions = [
            (parameter, SampleGradients(interleave(gradients)))
            for parameter, gradients in zip(ctx.clipped, of_parameters, strict=True)
        ]
        ctx.receive(contributions, changed_B)
        input_gradients: list[Tensor | None] = [None] * len(inputs)
        for i, gradient in zip(needed, of_inputs, strict=True):
            input_gradients[i] = gradient.to(inputs[i].dtype)
        return None, None, *[None] * count, *input_gradients


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often tensors were changed in place."""
    return [tensor._version for tensor in tensors]  # noqa: SLF001 (no public name)


def _refuse_object(name: str, value: Any) -> None:
    """Refuse what may hold tensors that the layer would get unseen."""
    if isinstance(value, nn.Module):
        raise UnsupportedError(
            f"{name} has no rule and gets another layer, whose gradients would be lost; freeze the "
            "parameters"
        )
    if hasattr(value, "__dict__") and not isinstance(value, type | types.FunctionType | enum.Enum):
        raise UnsupportedError(
            f"{name} has no rule and gets a {type(value).__name__}, which may hold tensors of "
            "samples; do without it (a cache: use_cache=False), or freeze the parameters"
        )


def run_any_layer(layer: nn.Module, receive: Receive, *inputs: Any, **named: Any) -> Any:
    """Run a patched layer that has no rule, with the batch on the first axis."""
    return run_any_layer_on((), layer, receive, *inputs, **named)


def run_any_layer_on(
    settings: Settings, layer: nn.Module, receive: Receive, *inputs: Any, **named: Any
) -> Any:
    """Run a patched layer that has no rule, with the batch where ``settings`` say.

    ``UnsupportedError``: it gets no tensor, or what may hold tensors; or returns none, or a number.
    ``ValueError``: a tensor has no second axis where the batch is, or one of another length.
    """
    assert isinstance(layer, PatchedLayer)
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return layer.original.forward(layer, *inputs, **named)  # frozen since it was patched
    arguments, structure = pytree.tree_flatten((inputs, named))
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    name = type(layer).__name__
    for value in arguments:
        if not isinstance(value, Tensor):
            _refuse_object(name, value)
    refuse_inputs(layer, tensors)
    if not tensors:
        raise UnsupportedError(
            f"{name} has no rule and gets no tensor, so it has no samples; name a module around it "
            "that gets and returns samples in as_one=[...], or freeze its parameters"
        )
    axis = int(is_second(layer, settings))
    if axis and (len({x.shape[1:2] for x in tensors}) > 1 or tensors[0].dim() <= axis):
        raise ValueError(
            f"{name} has no rule, so the second axis of each tensor that it gets must be the "
            f"batch; it got {shapes_of(tensors)}"
        )
    call = Call(layer, arguments, structure, axis)
    turned = [turn(x, axis) for x in tensors]
    outputs = iter(apply(_AnyLayer, call, receive, *call.trained.values(), *turned))
    values, structure = call.returned
    filled = [turn(next(outputs), axis) if value is _TENSOR else value for value in values]
    return pytree.tree_unflatten(filled, structure)
