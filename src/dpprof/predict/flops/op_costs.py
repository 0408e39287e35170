"""FLOPs of an operator by formula, and the bytes that it must read and write.

A multiplication and an addition are two FLOPs. Matrix products and attention are counted apart
from other operators, because steps are compared by the FLOPs of these two alone. Bytes are counted
as if each operator read each input once and wrote each output once.

Sources: matrix products, 2 m n k; convolutions as in ``flops.products``. Attention over S
queries and R keys of width D, for each head of each sample: 2 products of 2 S R D forward; 5
products backward, which recomputes the scores (Dao et al. 2022, "FlashAttention", algorithm 4; a
causal mask is not discounted). One FLOP for each element that an elementwise operator writes or a
reduction reads.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from dpprof.predict.flops.cost import (
    COUNTED,
    AttentionShape,
    Cost,
    OpFamily,
    ProductShape,
    is_aligned,
)
from dpprof.predict.flops.op_families import (
    FUSED,
    LOOKUPS,
    SCATTERS,
    fills_out,
    find_family,
    find_functional,
    is_free,
)
from dpprof.predict.flops.products import CONVOLUTIONS, PRODUCTS, PRODUCTS_OF_BITSANDBYTES
from dpprof.subjects.methods.tensors import tensors_in

aten = torch.ops.aten

SizedTensors = list[tuple[Tensor, int]]


# The registry has attention for CUDA alone.
_CPU_ATTENTION_FLOPS: dict[Any, Callable[..., int]] = {
    getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}"): flop_registry[
        getattr(aten, f"_scaled_dot_product_flash_attention{suffix}")
    ]
    for suffix in ("", "_backward")
}

_FRESH = {
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones),
    *(aten.new_full, aten.rand_like, aten.randn_like, aten.randint_like),
}
"""Operators that use only the shape, dtype and device of their first input."""

_WRITES_ONLY = {
    *(aten.fill, aten.zero, aten.copy, aten._foreach_zero, aten._foreach_copy),  # noqa: SLF001
    *(aten.normal, aten.uniform, aten.random, aten.bernoulli),
}
"""Operators whose in-place forms overwrite their target without reading it."""

_READ_AGAIN = (aten.native_layer_norm_backward, aten._fused_rms_norm_backward)  # noqa: SLF001
"""On CUDA a kernel of its own computes the gradients of scale and shift, where they are asked for
(layer_norm_kernel.cu)."""


class OperatorRule(NamedTuple):
    """What is known of an operator before it is called."""

    name: str
    packet: Any
    functional: Any  # the operator that computes the same and writes to no argument
    is_view: bool  # whether its result shares the storage of an argument
    is_free: bool  # whether it moves no bytes
    family: OpFamily
    shape_of: Callable[..., ProductShape] | None
    """Returns the sizes of a matrix product from its arguments."""

    arguments: tuple[str, ...]  # names of the arguments, by position
    mutated: frozenset[int | str]  # positions and names of the arguments that it writes to
    overwrites: bool  # whether it does not read what it writes to

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
        if self.functional in LOOKUPS and inputs:
            inputs[0] = (inputs[0][0], sum(size for _, size in writes))
        if self.functional in SCATTERS and mutated and not self.overwrites:
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
        """Return the FLOPs of a product or attention; None for others, or without a formula."""
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
    functional = find_functional(func, packet)
    mutated: set[int | str] = set()
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        is_unscaled = argument.name == "grads" and functional in FUSED  # written to unscale them
        if argument.alias_info is not None and argument.alias_info.is_write and not is_unscaled:
            mutated |= {position, argument.name}
    return OperatorRule(
        name=str(packet).removeprefix("aten."),
        packet=packet,
        functional=functional,
        is_view=func.is_view and packet is not aten.lift_fresh,
        is_free=is_free(func),
        family=find_family(packet, functional),
        shape_of=PRODUCTS.get(functional) or PRODUCTS_OF_BITSANDBYTES.get(str(packet)),
        arguments=tuple(argument.name for argument in func._schema.arguments),  # noqa: SLF001
        mutated=frozenset(mutated),
        overwrites=functional in _WRITES_ONLY or fills_out(func),
    )


def _nbytes(tensor: Tensor) -> int:
    """Count the distinct elements of a tensor: an expanded axis is read once."""
    if 0 not in tensor.stride():
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()
