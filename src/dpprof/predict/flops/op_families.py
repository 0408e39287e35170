"""What kind of work an operator does: by its name, by its tags, or by a table."""

import re
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dpprof.predict.flops.cost import OpFamily
from dpprof.predict.flops.products import PRODUCTS
from dpprof.private.norms import triton_ops

aten = torch.ops.aten

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
LOOKUPS = {
    *(aten.embedding, aten.gather, aten.index_select, aten.index, aten._unsafe_index, aten.take),  # noqa: SLF001
    aten.masked_select,
}
"""Operators that read as much of their first input as they write."""

SCATTERS = {
    *(aten.scatter_add, aten.scatter, aten.scatter_reduce, aten.index_add, aten.index_reduce),
    *(aten.index_put, aten._index_put_impl, aten._unsafe_index_put, aten.index_copy, aten.put),  # noqa: SLF001
}
"""Operators whose in-place forms read and write as many bytes as their source has."""

_INDEXING = {
    *(*LOOKUPS, *SCATTERS, aten.index_fill, aten.masked_scatter),
    # These search for positions.
    *(aten.sort, aten.topk, aten.kthvalue, aten.searchsorted, aten.bucketize, aten.nonzero),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive),  # noqa: SLF001
    *(aten.nonzero_static, aten.repeat_interleave, aten.isin, aten.unfold_backward),
    *(aten.embedding_dense_backward, aten._embedding_bag, aten._embedding_bag_dense_backward),  # noqa: SLF001
}
_COMMUNICATION = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
"""Namespaces of operators that move data between devices."""

_REDUCTIONS = {
    *(aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.prod, aten.argmax),
    *(aten.var, aten.var_mean, aten.std, aten.std_mean, aten.argmin, aten.nansum, aten.cumprod),
    *(aten.all, aten.any, aten.cumsum, aten.logsumexp, aten.nll_loss_forward),
    *(aten.nll_loss_backward, aten.trace, aten._foreach_max, triton_ops.SCALE),  # noqa: SLF001
}

FUSED = {
    *(aten._fused_adam, aten._fused_adamw, aten._fused_sgd, aten._fused_adagrad),  # noqa: SLF001
}
"""Optimizers that update all parameters in one kernel."""

_FAMILIES: dict[Any, OpFamily] = {
    **dict.fromkeys(_REDUCTIONS, "reduction"),
    **dict.fromkeys(_COPIES, "copy"),
    **dict.fromkeys(_INDEXING, "indexing"),
    **dict.fromkeys(PRODUCTS, "matmul"),
    **dict.fromkeys((aten.linalg_vector_norm, aten.norm, aten._foreach_norm), "norm"),  # noqa: SLF001
    **dict.fromkeys(FUSED, "optimizer"),
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


def find_functional(func: Any, packet: Any) -> Any:
    """Find ``foo`` for ``foo_``; the overload ``foo.out`` is one of ``foo`` already."""
    name = packet.__name__
    if not (func._schema.is_mutable and name.endswith("_")):  # noqa: SLF001
        return packet
    functional = getattr(getattr(torch.ops, func.namespace), name[:-1], None)
    return functional if isinstance(functional, torch._ops.OpOverloadPacket) else packet  # noqa: SLF001


def fills_out(func: Any) -> bool:
    """Return whether an operator writes its result into an argument."""
    return any(argument.is_out for argument in func._schema.arguments)  # noqa: SLF001


@cache
def family_of(name: str) -> OpFamily | None:
    """Return an operator's family by its name in a trace, such as ``aten::addmm``.

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
    return find_family(packet, find_functional(working[0], packet)) if working else None


def is_free(func: Any) -> bool:
    """Return whether an operator moves no bytes."""
    is_told = func._overloadpacket in _FREE or func.namespace in ("prim", "profiler")  # noqa: SLF001
    return is_told or _is_view(func) or _only_answers(func)


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
    if fills_out(func) or not func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd):
        return not fills_out(func)
    return any(func.has_kernel_for_dispatch_key(key) for key in (keys.CPU, keys.CUDA))


def find_family(packet: Any, functional: Any) -> OpFamily:
    """Return the family of an operator that has kernels of its own."""
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
