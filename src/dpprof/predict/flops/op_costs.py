"""FLOPs of an operator by formula, and the bytes that it must read and write.

A multiplication and an addition are two FLOPs. Matrix products and attention are counted apart
from other operators, because steps are compared by the FLOPs of these two alone. Bytes are counted
as if each operator read each input once and wrote each output once.

Sources: matrix products, 2 m n k; convolutions as in ``flops.convolutions``. Attention over S
queries and R keys of width D, for each head of each sample: 2 products of 2 S R D forward; 5
products backward, which recomputes the scores (Dao et al. 2022, "FlashAttention", algorithm 4; a
causal mask is not discounted). One FLOP for each element that an elementwise operator writes or a
reduction reads.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from dpprof.predict.flops.convolutions import CONVOLUTIONS
from dpprof.predict.flops.cost import (
    COUNTED,
    AttentionShape,
    Cost,
    OpFamily,
    ProductShape,
    is_aligned,
)
from dpprof.private.norms import triton_ops
from dpprof.subjects.methods.tensors import tensors_in

aten = torch.ops.aten

SizedTensors = list[tuple[Tensor, int]]


def _single(a: Tensor, b: Tensor) -> ProductShape:
    return 1, a.shape[-2], b.shape[-1], a.shape[-1]


def _batched(a: Tensor, b: Tensor) -> ProductShape:
    return a.shape[0], a.shape[-2], b.shape[-1], a.shape[-1]


def _grouped(a: Tensor, b: Tensor) -> ProductShape:
    """Groups divide one of the sizes, unless both operands have an axis of them."""
    return _batched(a, b) if a.dim() == b.dim() == 3 else _single(a, b)  # noqa: PLR2004


# torch's registry has formulas for some of these, which fail on the overloads with an out_dtype.
_SHAPES: dict[Any, Callable[..., ProductShape]] = {
    **dict.fromkeys((aten.mm, aten._int_mm), lambda a, b, *_, **__: _single(a, b)),  # noqa: SLF001
    **dict.fromkeys(
        (aten.addmm, aten._addmm_activation),  # noqa: SLF001
        lambda _, a, b, *__, **___: _single(a, b),
    ),
    aten.bmm: lambda a, b, *_, **__: _batched(a, b),
    **dict.fromkeys((aten.baddbmm, aten.addbmm), lambda _, a, b, *__, **___: _batched(a, b)),
    aten._grouped_mm: lambda a, b, *_, **__: _grouped(a, b),  # noqa: SLF001
    aten.mv: lambda a, *_, **__: (1, a.shape[0], 1, a.shape[1]),
    aten.addmv: lambda _, a, *__, **___: (1, a.shape[0], 1, a.shape[1]),
    **dict.fromkeys((aten.dot, aten.vdot), lambda a, *_, **__: (1, 1, 1, a.numel())),
    aten.addr: lambda _, a, b, *__, **___: (1, a.numel(), b.numel(), 1),
}
# The registry has attention for CUDA alone.
_CPU_ATTENTION_FLOPS: dict[Any, Callable[..., int]] = {
    getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}"): flop_registry[
        getattr(aten, f"_scaled_dot_product_flash_attention{suffix}")
    ]
    for suffix in ("", "_backward")
}

_OF_BITSANDBYTES: dict[str, Callable[..., ProductShape]] = {
    "bitsandbytes.int8_linear_matmul": lambda a, b: (1, a.shape[:-1].numel(), *b.shape),
}
"""By name, because they exist only once bitsandbytes is imported."""

_NO_PRODUCTS = ("bitsandbytes.int8_mm_dequant",)
"""Operators that scale the result of a product, which their name holds."""

_PRODUCT = re.compile(r"\w*mm|(add)?mv|matmul|linear|v?dot|addr|einsum|conv(olution|[123]d)?|rnn")
"""Matches a word in the name of an operator that is a product."""

_FREE = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
    *(aten.detach, aten.lift_fresh, aten._local_scalar_dense, aten._unsafe_view),  # noqa: SLF001
    *(aten.resize_, aten.set_, aten.empty_permuted, aten.record_stream),
}
"""Operators that move no bytes, which their schema does not say."""

_NUMBERS = {"IntType", "FloatType", "BoolType", "SymIntType", "SymBoolType"}
"""Kinds of results that are no tensors; a dtype is an int."""

_COPIES = {
    *(aten.clone, aten.copy, aten._to_copy, aten.cat, aten.stack, aten.fill, aten.zero),  # noqa: SLF001
    *(aten.zeros, aten.ones, aten.zeros_like, aten.ones_like, aten.full, aten.full_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.arange, aten.repeat),
    *(aten.scalar_tensor, aten._foreach_copy, aten._foreach_zero, aten.constant_pad_nd),  # noqa: SLF001
    *(aten.slice_backward, aten.select_backward, aten.triu, aten.tril),
    *(aten._stack, aten._cudnn_rnn_flatten_weight),  # noqa: SLF001
}
_FRESH = {
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones),
    *(aten.new_full, aten.rand_like, aten.randn_like, aten.randint_like),
}
"""Operators that use only the shape, dtype and device of their first input."""

_LOOKUPS = {
    *(aten.embedding, aten.gather, aten.index_select, aten.index, aten._unsafe_index, aten.take),  # noqa: SLF001
    aten.masked_select,
}
"""Operators that read as much of their first input as they write."""

_SCATTERS = {
    *(aten.scatter_add, aten.scatter, aten.scatter_reduce, aten.index_add, aten.index_reduce),
    *(aten.index_put, aten._index_put_impl, aten._unsafe_index_put, aten.index_copy, aten.put),  # noqa: SLF001
}
"""Operators whose in-place forms read and write as many bytes as their source has."""

_INDEXING = {
    *(*_LOOKUPS, *_SCATTERS, aten.index_fill, aten.masked_scatter),
    # These search for positions.
    *(aten.sort, aten.topk, aten.kthvalue, aten.searchsorted, aten.bucketize, aten.nonzero),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive),  # noqa: SLF001
    *(aten.nonzero_static, aten.repeat_interleave, aten.isin, aten.unfold_backward),
    *(aten.embedding_dense_backward, aten._embedding_bag, aten._embedding_bag_dense_backward),  # noqa: SLF001
}
_WRITES_ONLY = {
    *(aten.fill, aten.zero, aten.copy, aten._foreach_zero, aten._foreach_copy),  # noqa: SLF001
    *(aten.normal, aten.uniform, aten.random, aten.bernoulli),
}
"""Operators whose in-place forms overwrite their target without reading it."""

_COMMUNICATION = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
"""Namespaces of operators that move data between devices."""

_REDUCTIONS = {
    *(aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.prod, aten.argmax),
    *(aten.var, aten.var_mean, aten.std, aten.std_mean, aten.argmin, aten.nansum, aten.cumprod),
    *(aten.all, aten.any, aten.cumsum, aten.logsumexp, aten.nll_loss_forward),
    *(aten.nll_loss_backward, aten.trace, aten._foreach_max, triton_ops.SCALE),  # noqa: SLF001
}

_FUSED = {
    *(aten._fused_adam, aten._fused_adamw, aten._fused_sgd, aten._fused_adagrad),  # noqa: SLF001
}
"""Optimizers that update all parameters in one kernel."""

_FAMILIES: dict[Any, OpFamily] = {
    **dict.fromkeys(_REDUCTIONS, "reduction"),
    **dict.fromkeys(_COPIES, "copy"),
    **dict.fromkeys(_INDEXING, "indexing"),
    **dict.fromkeys(_SHAPES, "matmul"),
    **dict.fromkeys((aten.linalg_vector_norm, aten.norm, aten._foreach_norm), "norm"),  # noqa: SLF001
    **dict.fromkeys(_FUSED, "optimizer"),
    triton_ops.WEIGH: "elementwise",
    triton_ops.CROSS_ENTROPY: "reduction",
    triton_ops.NOISE: "random",
    triton_ops.DIGEST: "elementwise",
}

_UNTAGGED: tuple[tuple[str, OpFamily], ...] = (
    (r"(batch|group|layer|rms|weight)_norm|softmax|(?<!un)pool", "reduction"),
    (r"cum(sum|max|min)|segment_reduce|is_(all|any)_true", "reduction"),
    (r"(loss|cross_entropy|with_logits)$|loss(2d)?_forward", "reduction"),
    (r"upsample|grid_sampler|unpool|embedding|col2im|median|index|hist|bincount", "indexing"),
    (r"masked_scatter|^mode$", "indexing"),
    (r"_copy$|_clone$|_cat$|_scatter$|shuffle$|pad[123]d|pad(ded)?_|_dense|block_diag", "copy"),
    (r"^(im2col|flip|roll|rot90|eye|linspace|logspace|range|lift|_pin_memory)$", "copy"),
    (r"diag_embed|diagonal_backward|(tril|triu)_indices|_nested_select_backward", "copy"),
    (r"glu|hardswish|log_sigmoid|prelu|floor_divide|scale|quant|lstm|gru", "elementwise"),
    (r"^(complex|polar|_add_relu)$", "elementwise"),
    (r"^optimizer_update_", "optimizer"),
)
"""Families by name of operators whose tags do not say what they do; the first pattern decides."""


_READ_AGAIN = (aten.native_layer_norm_backward, aten._fused_rms_norm_backward)  # noqa: SLF001
"""On CUDA a kernel of its own computes the gradients of scale and shift, where they are asked for
(layer_norm_kernel.cu)."""


class OperatorRule(NamedTuple):
    """What is known of an operator before it is called."""

    name: str
    packet: Any
    functional: Any
    """The operator that computes the same and writes to no argument."""

    is_view: bool
    """Whether its result shares the storage of an argument."""

    is_free: bool
    """Whether it moves no bytes."""

    family: OpFamily
    shape_of: Callable[..., ProductShape] | None
    """From the arguments of a matrix product to its sizes."""

    arguments: tuple[str, ...]
    """Names of the arguments, by position."""

    mutated: frozenset[int | str]
    """Positions and names of the arguments that it writes to."""

    overwrites: bool
    """Whether it does not read what it writes to."""

    def price(self, args: Any, kwargs: Any, out: Any) -> tuple[Cost, SizedTensors, SizedTensors]:
        """Return the cost of a call, what it read and what it wrote."""
        inputs: SizedTensors = []
        mutated: SizedTensors = []
        for position, value in (*enumerate(args), *kwargs.items()):
            side = mutated if position in self.mutated else inputs
            side += [(tensor, _nbytes(tensor)) for tensor in tensors_in(value)]
        writes = mutated or [(tensor, _nbytes(tensor)) for tensor in tensors_in(out)]
        if self.functional in _FRESH:
            inputs.clear()
        if self.functional in _LOOKUPS and inputs:
            inputs[0] = (inputs[0][0], sum(size for _, size in writes))
        if self.functional in _SCATTERS and mutated and not self.overwrites:
            writes = [(mutated[0][0], inputs[-1][1] if inputs else 0)]
            mutated = writes
        reads = inputs if self.overwrites else inputs + mutated
        first = next(iter(inputs or mutated or writes), None)
        dtype = "" if first is None else str(first[0].dtype).removeprefix("torch.")
        product = self.shape_of and self.shape_of(*args, **kwargs)
        counted = self.count_products(args, kwargs, out)
        flops = self._count_others(reads, writes) if counted is None else counted
        unknown = counted is None and self.is_counted
        attention = self._find_attention(args, kwargs)
        matrices = [] if product is None else [tensor for tensor, _ in (*inputs, *writes)]
        aligned = all(map(is_aligned, matrices))
        find = CONVOLUTIONS.get(self.functional)
        convolution = () if find is None else tuple(find(*args, **kwargs, out=out))
        shapes = product, attention, aligned, convolution
        again = self.functional in _READ_AGAIN and any(kwargs.get("output_mask", args[-1])[1:])
        return Cost(self.name, self.family, flops, dtype, *shapes, unknown, again), reads, writes

    def _find_attention(self, args: Any, kwargs: Any) -> AttentionShape | None:
        if self.family != "attention" or not {"query", "key", "is_causal"} <= {*self.arguments}:
            return None
        by_name = dict(zip(self.arguments, args, strict=False)) | kwargs
        query, key = by_name["query"], by_name["key"]
        return AttentionShape(
            heads=math.prod(query.shape[:-2]),
            queries=query.shape[-2],
            keys=key.shape[-2],
            width=query.shape[-1],
            is_causal=bool(by_name.get("is_causal")),
            is_backward="backward" in self.name,
        )

    @property
    def is_counted(self) -> bool:
        """Whether its FLOPs are among the executed FLOPs."""
        return self.family in COUNTED

    def count_products(self, args: Any, kwargs: Any, out: Any) -> int | None:
        """Return the FLOPs of a matrix product or of attention.

        Returns:
            None for other operators, and for a product without a formula.
        """
        if self.shape_of is not None:
            return 2 * math.prod(self.shape_of(*args, **kwargs))
        if self.functional in CONVOLUTIONS:
            products = CONVOLUTIONS[self.functional](*args, **kwargs, out=out)
            return sum(2 * math.prod(shape) for shape in products)
        if self.functional in _CPU_ATTENTION_FLOPS:
            return _CPU_ATTENTION_FLOPS[self.functional](*args, **kwargs)
        if self.functional in flop_registry:
            return int(flop_registry[self.functional](*args, **kwargs, out_val=out))
        return None

    def _count_others(self, reads: SizedTensors, writes: SizedTensors) -> int:
        if self.family in ("elementwise", "optimizer"):
            return sum(tensor.numel() for tensor, _ in writes)
        if self.family in ("reduction", "norm"):
            return max((tensor.numel() for tensor, _ in reads), default=0)
        return 0


@cache
def learn_rule(func: Any) -> OperatorRule:
    """Return what is known of an operator before it is called."""
    packet = func._overloadpacket  # noqa: SLF001 (no public name)
    functional = _find_functional(func, packet)
    mutated: set[int | str] = set()
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        is_unscaled = argument.name == "grads" and functional in _FUSED  # written to unscale them
        if argument.alias_info is not None and argument.alias_info.is_write and not is_unscaled:
            mutated |= {position, argument.name}
    return OperatorRule(
        name=str(packet).removeprefix("aten."),
        packet=packet,
        functional=functional,
        is_view=func.is_view and packet is not aten.lift_fresh,
        is_free=packet in _FREE
        or _is_view(func)
        or _only_answers(func)
        or func.namespace in ("prim", "profiler"),
        family=_find_family(packet, functional),
        shape_of=_SHAPES.get(functional) or _OF_BITSANDBYTES.get(str(packet)),
        arguments=tuple(argument.name for argument in func._schema.arguments),  # noqa: SLF001
        mutated=frozenset(mutated),
        overwrites=functional in _WRITES_ONLY or _fills_out(func),
    )


def _find_functional(func: Any, packet: Any) -> Any:
    """Find ``foo`` for ``foo_``; the overload ``foo.out`` is one of ``foo`` already."""
    name = packet.__name__
    if not (func._schema.is_mutable and name.endswith("_")):  # noqa: SLF001
        return packet
    functional = getattr(getattr(torch.ops, func.namespace), name[:-1], None)
    return functional if isinstance(functional, torch._ops.OpOverloadPacket) else packet  # noqa: SLF001


def _fills_out(func: Any) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)  # noqa: SLF001


@cache
def family_of(name: str) -> OpFamily | None:
    """Return an operator's family by its name in a trace, such as ``aten::addmm``.

    Returns:
        None for views, for operators that only call others, and for other names.
    """
    namespace, _, called = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), called, None) if called else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001 (no public name)
        return None
    overloads = _list_overloads(packet)
    if packet in _FREE or any(map(_is_view, overloads)) or all(map(_only_answers, overloads)):
        return None
    working = [overload for overload in overloads if _does_work(overload)]
    return _find_family(packet, _find_functional(working[0], packet)) if working else None


def _is_view(func: Any) -> bool:
    """Return whether it is a view, or turns a tensor into a view of itself, as ``squeeze_``."""
    return func.is_view or torch.Tag.inplace_view in func.tags


def _only_answers(func: Any) -> bool:
    """Return whether it answers a question about shapes or dtypes, as ``promote_types``.

    Its results are numbers that do not depend on the elements of a tensor, so no kernel runs.
    """
    returns = func._schema.returns  # noqa: SLF001
    depends = torch.Tag.data_dependent_output in func.tags
    return bool(returns) and not depends and {x.type.kind() for x in returns} <= _NUMBERS


def _list_overloads(packet: Any) -> list[Any]:
    """List overloads that can be dispatched; some exist for TorchScript alone."""
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return [function for function in overloads if torch._C._dispatch_has_kernel(function.name())]  # noqa: SLF001


def _does_work(func: Any) -> bool:
    """Return whether an operator has kernels of its own, and does not only call others."""
    keys = torch._C.DispatchKey  # noqa: SLF001
    if _fills_out(func) or not func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd):
        return not _fills_out(func)
    return any(func.has_kernel_for_dispatch_key(key) for key in (keys.CPU, keys.CUDA))


def _find_family(packet: Any, functional: Any) -> OpFamily:
    if functional in _FAMILIES:
        return _FAMILIES[functional]
    family = _find_product(functional)
    if family is None and str(packet).partition(".")[0] in _COMMUNICATION:
        return "communication"
    return family or _find_by_tags(packet, functional)


def _find_product(functional: Any) -> OpFamily | None:
    """Return the family of a product, known by its name, unless it only calls others."""
    if str(functional) in _NO_PRODUCTS:
        return None
    words = functional.__name__.split("_")
    family: OpFamily = "attention" if "attention" in words else "matmul"
    if functional in flop_registry:
        return family
    is_called = family == "attention" or any(_PRODUCT.fullmatch(word) for word in words)
    works = is_called and any(_does_work(overload) for overload in _list_overloads(functional))
    return family if works else None


def _find_by_tags(packet: Any, functional: Any) -> OpFamily:
    """Return the family by the tags of all overloads: single overloads lack tags."""
    overloads = _list_overloads(packet) + _list_overloads(functional)
    tags = {tag for overload in overloads for tag in overload.tags}
    if torch.Tag.nondeterministic_seeded in tags:
        return "random"
    # The foreach operators have no tags; all but the norm above are elementwise.
    if torch.Tag.pointwise in tags or str(functional).startswith("aten._foreach_"):
        return "elementwise"
    if getattr(torch.Tag, "reduction", None) in tags:  # not in every supported torch
        return "reduction"
    for pattern, family in _UNTAGGED:
        if re.search(pattern, functional.__name__):
            return family
    return "elementwise" if "backward" in functional.__name__ else "other"


def _nbytes(tensor: Tensor) -> int:
    """Count the distinct elements of a tensor: an expanded axis is read once."""
    if 0 not in tensor.stride():
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()
