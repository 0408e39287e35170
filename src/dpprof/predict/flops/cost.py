"""What one call of an operator costs, the sizes that its speed depends on, and its kind.

The kind says what an operator's work is for, by its family, its phase and its caller. Recorded
bytes and traced times are summed by the same kinds, so bytes can be divided by seconds.
"""

from typing import Literal, NamedTuple, cast

from torch import Tensor

from dpprof.experiments.records.terms import OpKind, Phase

OpFamily = Literal[
    "matmul",
    "attention",
    "norm",
    "elementwise",
    "reduction",
    "indexing",
    "copy",
    "random",
    "optimizer",
    "communication",
    "other",
]
"""An operator's work, whoever calls it."""

Scope = Literal["norm", "einsum"]
"""The caller: a search for norms of per-sample gradients, or ``torch.einsum``."""

EINSUMS = ("einsum", "tensordot")
"""Functions of torch that contract axes by calling other operators."""

_KINDS: dict[OpFamily, OpKind] = {"matmul": "gemm", "reduction": "reduce"}
"""Kinds that have another name than their family."""

_OF_CLIPPING = ("elementwise", "reduction", "copy", "other")


def kind_of_op(family: OpFamily, phase: Phase | None, scope: Scope | None) -> OpKind:
    """Return the kind of an operator.

    The first of these rules that applies decides. Communication between devices is
    ``communication``. Operators of a search for norms are ``norm``. Operators of the phase step are
    ``optimizer``. Operators of a contraction are ``einsum``. In the phase clip, elementwise
    operators, reductions, copies and others are ``clip``. All others have the kind of their family.

    The phase is None if it is not known; the scope is the caller.
    """
    if family == "communication":
        return "communication"
    if scope == "norm":
        return "norm"
    if phase == "step":
        return "optimizer"
    if scope == "einsum":
        return "einsum"
    if phase == "clip" and family in _OF_CLIPPING:
        return "clip"
    return _KINDS.get(family) or cast("OpKind", family)


COUNTED = ("matmul", "attention")  # families whose FLOPs are the executed FLOPs

ProductShape = tuple[int, int, int, int]
"""Batch, m, n and k of products of ``(m, k)`` and ``(k, n)`` matrices."""


class AttentionShape(NamedTuple):
    """The sizes of fused attention."""

    heads: int  # heads of all samples together
    queries: int
    keys: int
    width: int
    is_causal: bool  # whether the kernel knows that a query sees no later key, and skips those
    is_backward: bool


class Cost(NamedTuple):
    """What one call of an operator costs."""

    op: str
    family: OpFamily
    flops: int
    dtype: str  # the first tensor's dtype; the speed of a matrix product depends on it
    product: ProductShape | None = None  # the sizes of a matrix product
    attention: AttentionShape | None = None
    is_aligned: bool = True
    """Whether all rows of a product's matrices begin on 16 bytes, as tensor cores read them."""

    convolution: tuple[ProductShape, ...] = ()
    """The sizes of the matrix products that a convolution amounts to."""

    formula_unknown: bool = False
    """Whether it is a product or attention without a formula; its FLOPs count as 0."""

    reads_again: bool = False
    """Whether a second kernel reads its operands again, as for the gradients of a norm's scale."""


_WORD_BYTES = 16


def is_aligned(matrix: Tensor) -> bool:
    """Return whether all rows of a matrix begin on 16 bytes, by whichever of its axes is dense."""
    rows = [step for step in matrix.stride()[-2:] if step != 1]
    return matrix.dim() < 2 or all(  # noqa: PLR2004 (vectors have no rows)
        step * matrix.element_size() % _WORD_BYTES == 0 for step in rows
    )
