"""The layers that clipping knows: how each is run, and what it adds to a gradient.

Each is an autograd function of its own. Its backward computes the gradient of the layer's
input, as autograd would, and hands over what the gradients of the parameters are made of
in place of computing them. What it needs is what it saved, so activation checkpointing
works as with any function, and no hook has to match calls with gradients.

Shape legend: B samples, T tokens (all axes between the first and the last), d width of an
input, p width of an output.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

from dpprof.clipping.contributions import Contribution, Lookup, Product, Scale, Shift, Whole
from dpprof.clipping.graph import nodes_behind
from dpprof.clipping.in_place import is_in_place
from dpprof.norms import placement
from dpprof.spec.registry import UnsupportedError

Forward = Callable[..., Tensor]
Added = Sequence[tuple[nn.Parameter, Contribution]]


class Use(Protocol):
    """A layer's connection to the clipping under way."""

    def hand_over(self, added: Added) -> None:
        """Take what a layer adds to its parameters' gradients."""


def _tokens(x: Tensor) -> Tensor:
    """See an input as (B, T, width)."""
    if x.dim() < 2:  # noqa: PLR2004
        raise ValueError("an input of a single axis has no samples; give it a batch axis")
    return x[:, None] if x.dim() == 2 else x.flatten(1, -2)  # noqa: PLR2004


def _in_norms_precision(x: Tensor) -> Tensor:
    """Turn a normalisation's input into float32 where autocast does: on CUDA."""
    casts = placement.follows_cuda_autocast(x) and _autocast_dtype(x) is not None
    return x.float() if casts else x


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def count_uses(losses: Tensor) -> Counter[nn.Parameter]:
    """Count how often losses depend on each parameter through a layer that is run here.

    What reentrant checkpointing hides is not counted.
    """
    uses: Counter[nn.Parameter] = Counter()
    for node in nodes_behind(losses):
        if isinstance(node, BackwardCFunction):
            uses.update(getattr(node, "clipped", ()))
    return uses


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
        ctx.clipped = [weight] if bias is None else [weight, bias]
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
        added: list[tuple[nn.Parameter, Contribution]] = []
        if ctx.needs_input_grad[1]:
            added.append((ctx.weight, Product(_tokens(x.detach()), of_tokens, ctx.transposed)))
        if ctx.needs_input_grad[2]:
            added.append((ctx.bias, Shift(of_tokens)))
        ctx.use.hand_over(added)
        return of_input, None, None, None, None


class _Embedding(torch.autograd.Function):
    """Rows of a table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, use: Use) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.use, ctx.clipped = weight, padding, use, [weight]
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        contribution = Lookup(ids.flatten(1), _tokens(g), ctx.weight.shape[0], ctx.padding)
        ctx.use.hand_over([(ctx.weight, contribution)])
        return None, None, None, None


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
        ctx.clipped = [one for one in (weight, bias) if one is not None]
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
        added: list[tuple[nn.Parameter, Contribution]] = []
        if ctx.needs_input_grad[1]:
            added.append((ctx.weight, Scale(flat[0], flat[1], flat[2], flat[3])))
        if ctx.needs_input_grad[2]:
            added.append((ctx.bias, Shift(flat[3])))
        ctx.use.hand_over(added)
        return of_input, None, None, None, None


class _RMSNorm(torch.autograd.Function):
    """Divide the last axes by their root mean square, and scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.RMSNorm, use: Use) -> Tensor:
        axes = list(range(-len(layer.normalized_shape), 0))
        exact = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
        rstd = exact.square().mean(axes, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd)
        ctx.weight, ctx.axes, ctx.use, ctx.clipped = weight, axes, use, [weight]
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
        if ctx.needs_input_grad[1]:
            axes = len(ctx.axes)
            flat_x, flat_rstd, flat_g = (_tokens(t.flatten(-axes)) for t in (x.detach(), rstd, g))
            ctx.use.hand_over([(ctx.weight, Scale(flat_x, None, flat_rstd, flat_g))])
        return of_input, None, None, None


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
        if input.dim() < 2 and torch.is_grad_enabled():  # noqa: PLR2004
            # Positions of one sample, or one id for each sample? They look the same.
            raise ValueError(
                f"an embedding looked up ids of shape {tuple(input.shape)}, of which no axis is "
                "known to be the batch's; give it (B, T), with a row for each sample"
            )
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
        UnsupportedError: The layer is a batch normalisation, or keeps statistics of its inputs,
            which no noise covers.
    """
    name = type(layer).__name__
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 (the common base)
        raise UnsupportedError(f"{name} mixes samples; use GroupNorm or LayerNorm")
    if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:  # noqa: SLF001
        raise UnsupportedError(
            f"{name} keeps statistics of its inputs without noise; set track_running_stats=False"
        )


def find_rule(layer: nn.Module) -> Callable[[Any, Use], Forward]:
    """Find how a layer is run: by its own rule, or if it has none by ``torch.func``.

    A subclass has the rule of the class whose ``forward`` it inherits.

    Raises:
        UnsupportedError: The layer has parameters beside layers in it, parameters that are made
            of others, or is run by something else, such as another ``Clipping``.
    """
    name = type(layer).__name__
    if "forward" in vars(layer) or is_in_place(layer):
        raise UnsupportedError(f"{name} is run by something else already; remove() that first")
    if isinstance(layer, ParametrizationList):
        raise UnsupportedError(
            "a parametrized weight is computed once for all samples, so it has no gradient of "
            "each; remove the parametrization, or freeze what it is made of"
        )
    for base in type(layer).__mro__:
        rule = RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None and vars(base).get("forward") == type(layer).forward:
            unknown = {name for name, _ in layer.named_parameters(recurse=False)} - KNOWN
            if unknown:
                raise UnsupportedError(
                    f"{name} has a parameter {min(unknown)} that its rule does not know; a "
                    "re-parametrized weight (weight_norm, say) has no gradient of each sample"
                )
            return rule
    if any(True for child in layer.children() for _ in child.parameters()):
        raise UnsupportedError(
            f"{name} has parameters of its own beside the layers in it; put them "
            "into a layer without others, or freeze them"
        )
    return run_other


KNOWN = {"weight", "bias"}
"""The parameters of every layer that has a rule."""
