"""What one call of an operator costs, and the sizes that its speed depends on."""

from typing import NamedTuple

from dpprof.flops.op_kinds import Family

COUNTED = ("matmul", "attention")
"""Families whose FLOPs are the executed FLOPs."""

ProductShape = tuple[int, int, int, int]
"""Batch, m, n and k of products of ``(m, k)`` and ``(k, n)`` matrices."""


class AttentionShape(NamedTuple):
    """The sizes of fused attention."""

    heads: int
    """Of all samples together."""

    queries: int
    keys: int
    width: int
    is_causal: bool
    """Whether the kernel knows that a query sees no later key, and skips those."""

    is_backward: bool


class Cost(NamedTuple):
    """What one call of an operator costs."""

    op: str
    family: Family
    flops: int
    dtype: str
    """Of the first tensor; the speed of a matrix product depends on it."""

    product: ProductShape | None = None
    """The sizes of a matrix product."""

    attention: AttentionShape | None = None
    is_aligned: bool = True
    """Whether all rows of a product's matrices begin on 16 bytes, as tensor cores read them."""

    formula_unknown: bool = False
    """Whether it is a product or attention without a formula; its FLOPs count as 0."""
