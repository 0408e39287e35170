"""Layers without a rule: they run again in backward, on each sample alone.

``torch.func`` maps them over samples, as Opacus does; code that it cannot map, such as a loop over
the experts that were chosen, runs for one sample after the other.

The first axis of what a layer returns has k entries of each sample, one in most cases
(``layout``). Tensors that a layer gets have as many, or are alike for all samples, such as
tables of rotary positions. Lengths may leave open which; so what each sample gives alone must be
what the layer gave, or the step is refused.

Memory: B times the layer's trained parameters, for their per-sample gradients; ``FlashClipping``
frees these after each layer.

Shape legend: B samples, N entries of all samples, k = N / B.
"""

import enum
import types
import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from dpprof.private.contributions.contributions import Receive, SampleGradients, storage_of
from dpprof.private.contributions.sample_norms import BatchAxisError
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.batch_axis import Settings, is_second
from dpprof.private.layers.layers import apply, as_own, autocast_dtype
from dpprof.private.layers.patching import PatchedLayer
from dpprof.private.norms.complex_numbers import interleave
from dpprof.private.norms.tiles import accumulator_of
from dpprof.private.refusals.tensor_kinds import refuse_inputs
from dpprof.private.substitutes import substitute

_SAME = {torch.float64: 1e-8, torch.float32: 1e-3}
"""By how much of its norm an entry's output may differ when it is computed again, to rounding."""

_SAME_IN_16_BITS = 2.0**-5

_HERE = object()
"""Where a layer returned a tensor."""

_not_mapped: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that ``torch.func`` cannot map over samples."""


def parametrizing_safely() -> AbstractContextManager[None]:
    """Let a parameter get a parametrization inside the context without a trace of it afterwards.

    Peft's adapters of experts give the frozen weight one whenever they run. PyTorch sets the weight
    to itself then, which ``released_state`` would take for a change. And under ``torch.func`` peft
    fails, which would leave the weight parametrized; so it fails before.
    """
    set_to = parametrize._maybe_set  # noqa: SLF001 (it has no public name)

    def set_to_other(one: Tensor, other: Tensor) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
            raise UnsupportedError("torch.func cannot register a parametrization")
        if one is not other:
            set_to(one, other)

    return substitute(parametrize, "_maybe_set", set_to_other)


class _Call(nn.Module):
    """One call of a layer's original ``forward``, to be repeated with other tensors.

    It is a module because ``functional_call`` needs one.

    Args:
        layer: The layer.
        arguments: Positional and keyword arguments, flattened.
        structure: How to unflatten them.
        axis: Where the layer has the batch, in its tensors and outputs; here it is the first.
    """

    def __init__(
        self, layer: PatchedLayer, arguments: Sequence[Any], structure: Any, axis: int
    ) -> None:
        super().__init__()
        self.layer, self._structure, self._axis = layer, structure, axis
        self._places = [at for at, one in enumerate(arguments) if isinstance(one, Tensor)]
        self._arguments = [None if isinstance(one, Tensor) else one for one in arguments]
        self.autocast = autocast_dtype(arguments[self._places[0]])
        self.trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        self.returned: tuple[list[Any], Any] = [], None
        """What the layer returned: its values, ``_HERE`` in place of tensors, and their structure.
        """

    @property
    def name(self) -> str:
        """The layer's class."""
        return type(self.layer).__name__

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        """Run the layer on other tensors."""
        flat = list(self._arguments)
        for place, tensor in zip(self._places, tensors, strict=True):
            flat[place] = turn(tensor, self._axis)
        inputs, named = pytree.tree_unflatten(flat, self._structure)
        with parametrizing_safely():
            returned = self.layer.original.forward(self.layer, *inputs, **named)
        return pytree.tree_map(lambda one: turn(one, self._axis), returned)

    def run_with(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run it with other parameters too, and list the outputs that have gradients."""
        state = dict(zip(self.trained, parameters, strict=True))
        return _with_gradients(torch.func.functional_call(self, state, (tensors,)))


def _with_gradients(returned: Any) -> list[Tensor]:
    tensors = (one for one in pytree.tree_leaves(returned) if isinstance(one, Tensor))
    return [one for one in tensors if _has_gradient(one)]


def _has_gradient(y: Tensor) -> bool:
    """Tell whether a tensor's numbers are real or complex ones."""
    return y.is_floating_point() or y.is_complex()


class _AnyLayer(torch.autograd.Function):
    """Any layer; its backward materialises the per-sample gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, receive: Receive, *tensors: Tensor) -> Any:
        count = len(call.trained)
        ctx.save_for_backward(*tensors[count:])
        ctx.clipped, ctx.call, ctx.receive = tensors[:count], call, receive
        ctx.samples = None  # ``layout`` sets on how many it runs, 0 if it cannot prove it, and why
        versions = versions_of(tensors)
        values, structure = pytree.tree_flatten(call.forward(tensors[count:]))
        if versions_of(tensors) != versions:
            raise UnsupportedError(
                f"{call.name} has no rule and changes its inputs in place; change copies, or "
                "freeze its parameters"
            )
        held = {storage_of(one) for one in tensors}
        for at, y in enumerate(values):
            if isinstance(y, Tensor):
                # In-place code after the layer must reach neither its inputs nor other outputs.
                values[at] = y.clone() if storage_of(y) in held else as_own(y)
                held.add(storage_of(values[at]))
        outputs = [one for one in values if isinstance(one, Tensor)]
        real = _with_gradients(outputs)
        if not real or not all(y.dim() for y in real):
            raise UnsupportedError(
                f"{call.name} has no rule and returns {'a number' if real else 'no tensor'}, which "
                "has no samples; freeze its parameters"
            )
        call.returned = [_HERE if isinstance(one, Tensor) else one for one in values], structure
        ctx.mark_non_differentiable(*(y for y in outputs if not _has_gradient(y)))
        ctx.real = [at for at, y in enumerate(outputs) if _has_gradient(y)]
        ctx.why = ""
        ctx.projected = [_project(y) for y in real] if any(ctx.needs_input_grad) else None
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> Any:
        call: _Call = ctx.call
        count = len(call.trained)
        inputs = ctx.saved_tensors
        needed = [i for i in range(len(inputs)) if ctx.needs_input_grad[2 + count + i]]
        gs = [of_outputs[at] for at in ctx.real]
        samples = len(gs[0]) if ctx.samples is None else ctx.samples
        if (samples == 0 and len(gs[0])) or any(len(g) % max(samples, 1) for g in gs):
            raise BatchAxisError(
                f"{call.name} has no rule and returned {_shapes(gs)}, whose first axis is not "
                f"proven to have rows of each sample{ctx.why and f' ({ctx.why})'}; name a module "
                "around it that gets and returns samples in as_one=[...], or freeze its parameters"
            )
        run = _Rerun(call, ctx.clipped, inputs, needed, gs, samples)
        of_parameters, of_inputs, changed_B = run.find(ctx.projected)
        contributions = [
            (parameter, SampleGradients(interleave(gradients)))
            for parameter, gradients in zip(ctx.clipped, of_parameters, strict=True)
        ]
        ctx.receive(contributions, changed_B)
        found = {i: one.to(inputs[i].dtype) for i, one in zip(needed, of_inputs, strict=True)}
        return None, None, *[None] * count, *[found.get(i) for i in range(len(inputs))]


class _Found(NamedTuple):
    """What running a layer again on each sample gives."""

    of_parameters: Sequence[Tensor]
    """(B, *shape of the parameter) each."""

    of_inputs: Sequence[Tensor]
    """The gradients of inputs, in their shapes."""

    changed_B: Tensor
    """Which samples' outputs differ from those of forward."""


class _Rerun:
    """Runs a layer again on each sample alone.

    Args:
        call: The layer's call.
        parameters: Its trained parameters.
        inputs: The tensors that it got.
        needed: Which of them need a gradient.
        gs: The gradients of its outputs.
        samples: B.
    """

    def __init__(  # noqa: PLR0917
        self,
        call: _Call,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        needed: Sequence[int],
        gs: Sequence[Tensor],
        samples: int,
    ) -> None:
        self._call, self._parameters, self._needed = call, parameters, needed
        # vmap of a group norm's backward with float32 weights accepts no other inputs.
        self._inputs = [
            x.float() if call.autocast is not None and x.dtype == call.autocast else x
            for x in inputs
        ]
        self._gs, self._samples = gs, samples

    def find(self, projected: Sequence[Tensor]) -> _Found:
        """Find gradients with the inputs cut among samples in the first way that fits.

        Raises:
            UnsupportedError: The layer does not run on one sample.
        """
        ways = self._ways_to_cut()
        first: _Found | None = None
        problem: Exception | None = None
        for cut in ways:
            try:
                found = self._run(cut, projected)
            except (torch.OutOfMemoryError, UnsupportedError):
                raise
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                problem = problem or error
                continue
            is_certain = len(ways) == 1 or isinstance(found.changed_B, FakeTensor)
            if is_certain or not found.changed_B.any():
                return found
            first = first or found
        if first is not None:
            return first  # its change is refused
        assert problem is not None
        raise UnsupportedError(
            f"{self._call.name} has no rule and got {_shapes(self._inputs)}; it does not run on "
            f"one sample alone, and raises {type(problem).__name__}"
        ) from None

    def _may_be_cut(self, i: int) -> bool:
        first = self._inputs[i].shape[:1]
        return bool(first) and first[0] % max(self._samples, 1) == 0

    def _ways_to_cut(self) -> list[set[int]]:
        """List which inputs have k entries of each sample, likely ways first.

        Those with a gradient are not alike for all samples; others may be, whatever their length.
        """
        sure = {i for i in self._needed if self._may_be_cut(i)}
        lengths = {len(one) for one in (*self._gs, *(self._inputs[i] for i in sure))}
        may = [
            i
            for i, x in enumerate(self._inputs)
            if i not in sure and self._may_be_cut(i) and len(x) in lengths
        ]
        one_less = [sure | ({*may} - {i}) for i in may]
        return [sure | {*may}, *one_less, *([sure] if len(may) > 1 else [])]

    def _run(self, cut: Collection[int], projected: Sequence[Tensor]) -> _Found:
        call, count = self._call, len(self._parameters)
        each = [self._split(x) if i in cut else x.detach() for i, x in enumerate(self._inputs)]
        places = [0 if i in cut else None for i in range(len(each))]
        gs = [self._split(g) for g in self._gs]
        kind = gs[0].device.type
        with torch.autocast(kind, dtype=call.autocast, enabled=call.autocast is not None):
            found, ys = self._map(each, places, gs)
        changed = [
            _differs(y.flatten(0, 1), projected_N, g.dtype).view(self._samples, -1).any(1)
            for y, projected_N, g in zip(ys, projected, self._gs, strict=True)
        ]
        of_inputs = [
            one.flatten(0, 1) if i in cut else one.sum(0)
            for i, one in zip(self._needed, found[count:], strict=True)
        ]
        return _Found(found[:count], of_inputs, torch.stack(changed).any(0))

    def _split(self, x: Tensor) -> Tensor:
        """Cut (N, ...) into (B, k, ...) with the strides of its shape, as vmap of conv requires."""
        x = torch.unflatten(x.detach(), 0, (self._samples, -1))
        strides = torch.empty(x.shape, device="meta").stride()
        is_plain = x.stride() == strides
        return x if is_plain else x.clone(memory_format=torch.contiguous_format)

    def _map(
        self, each: Sequence[Tensor], places: Sequence[int | None], gs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return gradients of parameters and inputs, and outputs; of all samples."""
        layer = type(self._call.layer)
        if layer not in _not_mapped:
            try:
                mapped = torch.func.vmap(self._differentiate, in_dims=(places, 0))
                found: tuple[list[Tensor], list[Tensor]] = mapped(list(each), list(gs))
            except Exception as error:  # any code may run here
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                if "randomness" in str(error):
                    return self._loop_if_numbers_do_not_matter(each, places, gs)
            else:
                return found
        found = self._loop(each, places, gs)
        _not_mapped.add(layer)
        return found

    def _loop_if_numbers_do_not_matter(self, *inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Run samples with two draws of random numbers, which must give the same."""
        found, again = self._loop(*inputs), self._loop(*inputs)
        for one, other in zip((*found[0], *found[1]), (*again[0], *again[1]), strict=True):
            if not torch.equal(one, other):
                raise UnsupportedError(
                    f"{self._call.name} has no rule and draws random numbers, which differ when "
                    "its per-sample gradients are computed; move them to a layer without "
                    "parameters"
                )
        return found

    def _loop(
        self, each: Sequence[Tensor], places: Sequence[int | None], gs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Do the same for one sample after the other."""
        gradients: list[Tensor] = []
        outputs: list[Tensor] = []
        for b in range(self._samples):
            inputs = [x if at is None else x[b] for x, at in zip(each, places, strict=True)]
            found, ys = self._differentiate_alone(inputs, [g[b] for g in gs])
            if not b:
                gradients = [one.new_empty(self._samples, *one.shape) for one in found]
                outputs = [y.new_empty(self._samples, *y.shape) for y in ys]
            for all_of_it, one in zip((*gradients, *outputs), (*found, *ys), strict=True):
                all_of_it[b] = one
        return gradients, outputs

    def _differentiate(
        self, inputs: Sequence[Tensor], gs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Differentiate one sample by ``torch.func``."""
        y, pull_back, *_ = torch.func.vjp(
            lambda *given: self._run_sample(inputs, given),
            *self._parameters,
            *(inputs[i] for i in self._needed),
        )
        found = pull_back([g.to(one.dtype) for g, one in zip(gs, y, strict=True)])
        return list(found), y

    def _differentiate_alone(
        self, inputs: Sequence[Tensor], gs: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Differentiate one sample by autograd."""
        given = [*self._parameters, *(inputs[i] for i in self._needed)]
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in given]
            # Code may change its inputs in place, and leaves must stay.
            y = self._run_sample(inputs, [one.clone() for one in leaves])
        pairs = [(one, g.to(one.dtype)) for one, g in zip(y, gs, strict=True) if one.requires_grad]
        found = torch.autograd.grad(
            [one for one, _ in pairs], leaves, [g for _, g in pairs], materialize_grads=True
        )
        return [one.to_dense() for one in found], [one.detach() for one in y]

    def _run_sample(self, inputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """Run a sample with other parameters, and other tensors where gradients are needed."""
        count = len(self._parameters)
        tensors = list(inputs)
        for i, x in zip(self._needed, given[count:], strict=True):
            tensors[i] = x
        return self._call.run_with(given[:count], tensors)


def turn(x: Any, axis: int) -> Any:
    """Exchange the first axis of a tensor with another; leave anything else as it is."""
    return x.transpose(0, axis) if axis and isinstance(x, Tensor) and x.dim() > axis else x


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often tensors were changed in place."""
    return [one._version for one in tensors]  # noqa: SLF001 (no public name)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(one.shape)) for one in tensors)


def _flatten(y: Tensor) -> Tensor:
    return y.flatten(1) if y.dim() > 1 else y[:, None]


def _project(y: Tensor) -> Tensor:
    """Project each entry's output onto one vector, which is no multiple of a likely one; (N,)."""
    with torch.autocast(y.device.type, enabled=False):
        flat = _flatten(interleave(y.detach())).to(accumulator_of(y.dtype.to_real()))
        places = torch.arange(flat.shape[1], device=y.device, dtype=flat.dtype)
        projected_N: Tensor = flat @ places.mul_(0.7).sin_()
        return projected_N


def _differs(y: Tensor, projected_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Tell which entries have another output than the one of ``dtype`` that was projected; (N,)."""
    limit = _SAME.get(dtype.to_real(), _SAME_IN_16_BITS)
    moved_N = (_project(y) - projected_N).abs()
    is_same_N = moved_N <= limit * torch.linalg.vector_norm(_flatten(y), dim=1)
    changed_N: Tensor = ~is_same_N & projected_N.isfinite()
    return changed_N


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

    Raises:
        UnsupportedError: It gets no tensor, or a layer, or an object that may hold tensors; or it
            returns no tensor, or a number.
        ValueError: The batch is on the second axis, and a tensor has none, or one of another
            length.
    """
    assert isinstance(layer, PatchedLayer)
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return layer.original.forward(layer, *inputs, **named)  # frozen since it was patched
    arguments, structure = pytree.tree_flatten((inputs, named))
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    name = type(layer).__name__
    for one in arguments:
        if not isinstance(one, Tensor):
            _refuse_object(name, one)
    refuse_inputs(layer, tensors)
    if not tensors:
        raise UnsupportedError(f"{name} has no rule and gets no tensor, so it has no samples")
    axis = int(is_second(layer, settings))
    if axis and (len({one.shape[1:2] for one in tensors}) > 1 or tensors[0].dim() <= axis):
        raise ValueError(
            f"{name} has no rule, so the second axis of each tensor that it gets must be the "
            f"batch; it got {_shapes(tensors)}"
        )
    call = _Call(layer, arguments, structure, axis)
    turned = [turn(one, axis) for one in tensors]
    outputs = iter(apply(_AnyLayer, call, receive, *call.trained.values(), *turned))
    values, structure = call.returned
    filled = [turn(next(outputs), axis) if one is _HERE else one for one in values]
    return pytree.tree_unflatten(filled, structure)
