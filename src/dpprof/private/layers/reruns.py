"""Runs a layer again, on each sample alone, and differentiates it.

``torch.func`` maps it over samples, as Opacus does; code that it cannot map, such as a loop over
the experts that were chosen, runs for one sample after another.

The first axis of what a layer returns has k entries of each sample, one in most cases
(``layout``). Tensors that a layer gets have as many, or are alike for all samples, such as
tables of rotary positions. Lengths may leave open which; so what each sample gives alone must be
what the layer gave, or the step is refused. A branch that is still zero lets several readings give
that, whose gradients differ: then a batch that left nothing open decides, or the step is refused.

Shape legend: B samples, N entries of all samples, k = N / B.
"""

import secrets
import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.layers import autocast_dtype
from dpprof.private.layers.patching import PatchedLayer
from dpprof.private.norms.complex_numbers import interleave
from dpprof.private.norms.tiles import accumulator_of
from dpprof.private.substitutes import substitute

_SAME = {torch.float64: 1e-8, torch.float32: 1e-3}  # share of its norm that rounding may move
_SAME_IN_16_BITS = 2.0**-5

_not_mapped: weakref.WeakSet[type] = weakref.WeakSet()  # that ``torch.func`` cannot map

_cut: weakref.WeakKeyDictionary[nn.Module, dict[Any, set[int]]] = weakref.WeakKeyDictionary()
"""Which tensors that a layer got had entries of each sample, by what it got, once that is sure."""

_ODD, _SHIFT = 2 * secrets.randbits(61) + 1, secrets.randbits(61)
"""What the vector of ``project`` follows from: no output can be made to hide from it."""


def parametrizing_safely() -> AbstractContextManager[None]:
    """Let a parameter get a parametrization inside the context without a trace of it afterwards.

    Whenever peft's adapters of experts run, they parametrize the frozen weight. PyTorch sets the
    weight to itself then, which ``released_state`` would take for a change. And under
    ``torch.func`` peft fails and would leave the weight parametrized; so it fails before.
    """
    set_to = parametrize._maybe_set  # noqa: SLF001 (it has no public name)

    def set_to_other(tensor: Tensor, other: Tensor) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
            raise UnsupportedError("torch.func cannot register a parametrization")
        if tensor is not other:
            set_to(tensor, other)

    return substitute(parametrize, "_maybe_set", set_to_other)


class Call(nn.Module):
    """One call of a layer's original ``forward``, to be repeated with other tensors.

    It is a module because ``functional_call`` needs one. ``arguments`` are positional and keyword
    ones, flattened from a ``structure``. The batch's ``axis`` is that of the layer; here it is the
    first.
    """

    def __init__(
        self, layer: PatchedLayer, arguments: Sequence[Any], structure: Any, axis: int
    ) -> None:
        super().__init__()
        self.layer, self._structure, self._axis = layer, structure, axis
        self._places = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]
        self._arguments = [None if isinstance(value, Tensor) else value for value in arguments]
        self.autocast = autocast_dtype(arguments[self._places[0]])
        self.trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        self.returned: tuple[list[Any], Any] = [], None  # values, marks for tensors, structure

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
        return pytree.tree_map(lambda value: turn(value, self._axis), returned)


def with_gradients(returned: Any) -> list[Tensor]:
    """List the tensors that have gradients."""
    tensors = (y for y in pytree.tree_leaves(returned) if isinstance(y, Tensor))
    return [y for y in tensors if has_gradient(y)]


def has_gradient(y: Tensor) -> bool:
    """Tell whether a tensor's numbers are real or complex ones."""
    return y.is_floating_point() or y.is_complex()


class Gradients(NamedTuple):
    """What running a layer again on each sample gives."""

    of_parameters: Sequence[Tensor]  # (B, *shape of the parameter) each
    of_inputs: Sequence[Tensor]  # the gradients of inputs, in their shapes
    changed_B: Tensor  # which samples' outputs differ from those of forward


class Rerun:
    """Runs a layer's call again on each of ``samples`` samples alone."""

    def __init__(  # noqa: PLR0917
        self,
        call: Call,
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

    def find(self, projected: Sequence[Tensor]) -> Gradients:
        """Find gradients with the inputs cut among samples in the only way that fits.

        Raises:
            UnsupportedError: None runs, or several fit whose gradients differ.
        """
        layer: Any = self._call.layer
        settled = _cut.setdefault(layer, {})
        kind = (*self._needed, *(x.shape[:1] == (1,) for x in self._inputs))
        ways = sorted(self._ways_to_cut(), key=lambda cut: cut != settled.get(kind))
        fitting: list[tuple[set[int], Gradients]] = []
        first: Gradients | None = None
        problem: Exception | None = None
        for cut in ways:
            try:
                gradients = self._run(cut, projected)
            except (torch.OutOfMemoryError, UnsupportedError):
                raise
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                problem = problem or error
                continue
            is_fake = isinstance(gradients.changed_B, FakeTensor)
            if len(ways) == 1 and not is_fake:
                settled[kind] = cut
            if len(ways) == 1 or self._samples == 1 or is_fake:
                return gradients
            if gradients.changed_B.any():
                first = first or gradients
            elif cut == settled.get(kind):
                return gradients
            else:
                fitting.append((cut, gradients))
        if fitting:
            return self._decide(fitting, settled, kind)
        if first is not None:
            return first  # its change is refused
        assert problem is not None
        raise UnsupportedError(
            f"{self._call.name} has no rule and got {shapes_of(self._inputs)}; it does not run on "
            f"one sample alone, and raises {type(problem).__name__}"
        ) from None

    def _decide(
        self, fitting: Sequence[tuple[set[int], Gradients]], settled: dict[Any, set[int]], kind: Any
    ) -> Gradients:
        """Return the gradients of the only way that fits, or of several that agree."""
        (cut, gradients), *others = fitting
        if not others:
            settled[kind] = cut
        for _, other in others:
            for own, again in zip(
                (*gradients.of_parameters, *gradients.of_inputs),
                (*other.of_parameters, *other.of_inputs),
                strict=True,
            ):
                limit = _SAME.get(own.dtype.to_real(), _SAME_IN_16_BITS)
                parts = (part.nan_to_num(0.0, 0.0, 0.0) for part in (own, own - again))
                size, moved = map(torch.linalg.vector_norm, parts)
                if moved > limit * size:
                    raise UnsupportedError(
                        f"{self._call.name} has no rule and got {shapes_of(self._inputs)}, of "
                        f"{self._samples} samples: lengths do not tell which of these tensors have "
                        "entries of each sample, and gradients depend on it; keep what is alike "
                        "for all samples in a buffer of the layer, or take batches of another size"
                    )
        return gradients

    def _may_be_cut(self, i: int) -> bool:
        first = self._inputs[i].shape[:1]
        return bool(first) and first[0] % max(self._samples, 1) == 0

    def _ways_to_cut(self) -> list[set[int]]:
        """List the sets of inputs that may have k entries of each sample, likely ones first.

        Inputs with a gradient are not alike for all samples; others may be, whatever their length.
        """
        sure = {i for i in self._needed if self._may_be_cut(i)}
        lengths = {len(tensor) for tensor in (*self._gs, *(self._inputs[i] for i in sure))}
        may = [
            i
            for i, x in enumerate(self._inputs)
            if i not in sure and self._may_be_cut(i) and len(x) in lengths
        ]
        one_less = [sure | ({*may} - {i}) for i in may]
        return [sure | {*may}, *one_less, *([sure] if len(may) > 1 else [])]

    def _run(self, cut: Collection[int], projected: Sequence[Tensor]) -> Gradients:
        call, count = self._call, len(self._parameters)
        each = [self._split(x) if i in cut else x.detach() for i, x in enumerate(self._inputs)]
        places = [0 if i in cut else None for i in range(len(each))]
        gs = [self._split(g) for g in self._gs]
        kind = gs[0].device.type
        with torch.autocast(kind, dtype=call.autocast, enabled=call.autocast is not None):
            gradients, ys = self._map(each, places, gs)
        changed = [
            _differs(y.flatten(0, 1), projected_N, g.dtype).view(self._samples, -1).any(1)
            for y, projected_N, g in zip(ys, projected, self._gs, strict=True)
        ]
        of_inputs = [
            gradient.flatten(0, 1) if i in cut else gradient.sum(0)
            for i, gradient in zip(self._needed, gradients[count:], strict=True)
        ]
        return Gradients(gradients[:count], of_inputs, torch.stack(changed).any(0))

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
                results: tuple[list[Tensor], list[Tensor]] = mapped(list(each), list(gs))
            except Exception as error:  # any code may run here
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                if "randomness" in str(error):
                    return self._loop_if_numbers_do_not_matter(each, places, gs)
            else:
                return results
        results = self._loop(each, places, gs)
        _not_mapped.add(layer)
        return results

    def _loop_if_numbers_do_not_matter(self, *inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Run samples with two draws of random numbers, which must give the same."""
        first, again = self._loop(*inputs), self._loop(*inputs)
        for tensor, repeated in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
            if not torch.equal(tensor, repeated):
                raise UnsupportedError(
                    f"{self._call.name} has no rule and draws random numbers, which differ when "
                    "its per-sample gradients are computed; move them to a layer without "
                    "parameters"
                )
        return first

    def _loop(
        self, each: Sequence[Tensor], places: Sequence[int | None], gs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        gradients: list[Tensor] = []
        outputs: list[Tensor] = []
        for b in range(self._samples):
            inputs = [x if axis is None else x[b] for x, axis in zip(each, places, strict=True)]
            own_gradients, ys = self._differentiate_alone(inputs, [g[b] for g in gs])
            if not b:
                gradients = [g.new_empty(self._samples, *g.shape) for g in own_gradients]
                outputs = [y.new_empty(self._samples, *y.shape) for y in ys]
            for all_samples, own in zip((*gradients, *outputs), (*own_gradients, *ys), strict=True):
                all_samples[b] = own
        return gradients, outputs

    def _differentiate(
        self, inputs: Sequence[Tensor], gs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        ys, pull_back, *_ = torch.func.vjp(
            lambda *operands: self._run_sample(inputs, operands),
            *self._parameters,
            *(inputs[i] for i in self._needed),
        )
        gradients = pull_back([g.to(y.dtype) for g, y in zip(gs, ys, strict=True)])
        return list(gradients), ys

    def _differentiate_alone(
        self, inputs: Sequence[Tensor], gs: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        operands = [*self._parameters, *(inputs[i] for i in self._needed)]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in operands]
            # Code may change its inputs in place, and leaves must stay.
            ys = self._run_sample(inputs, [leaf.clone() for leaf in leaves])
        pairs = [(y, g.to(y.dtype)) for y, g in zip(ys, gs, strict=True) if y.requires_grad]
        gradients = torch.autograd.grad(
            [y for y, _ in pairs], leaves, [g for _, g in pairs], materialize_grads=True
        )
        return [gradient.to_dense() for gradient in gradients], [y.detach() for y in ys]

    def _run_sample(self, inputs: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
        """Run a sample with other parameters, and other tensors where gradients are needed."""
        count = len(self._parameters)
        tensors = list(inputs)
        for i, x in zip(self._needed, operands[count:], strict=True):
            tensors[i] = x
        state = dict(zip(self._call.trained, operands[:count], strict=True))
        return with_gradients(torch.func.functional_call(self._call, state, (tensors,)))


def turn(x: Any, axis: int) -> Any:
    """Exchange the first axis of a tensor with another; leave anything else as it is."""
    return x.transpose(0, axis) if axis and isinstance(x, Tensor) and x.dim() > axis else x


def shapes_of(tensors: Sequence[Tensor]) -> str:
    """Describe the shapes of tensors, for a message."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


def _flatten(y: Tensor) -> Tensor:
    return y.flatten(1) if y.dim() > 1 else y[:, None]


def project(y: Tensor) -> Tensor:
    """Project each entry's output onto a vector that is no multiple of a likely output; (N,)."""
    with torch.autocast(y.device.type, enabled=False):
        flat = _flatten(interleave(y.detach())).to(accumulator_of(y.dtype.to_real()))
        places = torch.arange(flat.shape[1], device=y.device).mul_(_ODD).add_(_SHIFT)
        drawn = places.bitwise_right_shift_(40).bitwise_and_(2**20 - 1).to(flat.dtype)
        projected_N: Tensor = flat @ drawn.mul_(2.0**-20).add_(0.5)  # of 0.5 to 1.5: no zeros
        return projected_N


def _differs(y: Tensor, projected_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Tell which entries' outputs are not those of ``dtype`` that were projected; (N,)."""
    limit = _SAME.get(dtype.to_real(), _SAME_IN_16_BITS)
    moved_N = (project(y) - projected_N).abs()
    is_same_N = moved_N <= limit * torch.linalg.vector_norm(_flatten(y), dim=1)
    changed_N: Tensor = ~is_same_N & projected_N.isfinite()
    return changed_N
