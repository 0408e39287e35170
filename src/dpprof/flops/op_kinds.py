"""What work is for: the kinds of operators by which bytes and a trace's times are summed up.

Both know the family of an operator, the phase it ran in, and the scope that it was called
from; so both give it the same kind, and bytes can be divided by seconds.
"""

from typing import Literal

from dpprof.records.terms import OpKind, Phase

Family = Literal[
    "matmul",
    "attention",
    "norm",
    "elementwise",
    "reduction",
    "indexing",
    "copy",
    "random",
    "other",
]
"""What an operator does, whoever calls it."""

Scope = Literal["norm", "einsum"]
"""Who calls: what finds norms of per-sample gradients, or a contraction by ``torch.einsum``."""

EINSUMS = ("einsum", "tensordot")
"""Functions of torch that contract any axes, in terms of other operators."""

_ALWAYS: dict[Family, OpKind] = {
    "norm": "norm",
    "attention": "attention",
    "matmul": "gemm",
    "indexing": "indexing",
    "random": "random",
}
_UNLESS_CLIPPING: dict[Family, OpKind] = {
    "elementwise": "elementwise",
    "reduction": "reduce",
    "copy": "copy",
    "other": "other",
}


def kind_of_op(family: Family, phase: Phase | None, scope: Scope | None) -> OpKind:
    """Tell the kind of an operator.

    What finds norms is ``norm``, whatever it is made of, and the optimizer's step likewise
    ``optimizer``; then come contractions, ``einsum``; then what the operator itself tells.
    In the phase clip, what is left of it is ``clip``: factors, and sums weighted by them.

    Args:
        family: What the operator does.
        phase: In which phase; None if that is not known.
        scope: Who called it.
    """
    if scope == "norm":
        return "norm"
    if phase == "step":
        return "optimizer"
    if scope == "einsum":
        return "einsum"
    if family in _ALWAYS:
        return _ALWAYS[family]
    return "clip" if phase == "clip" else _UNLESS_CLIPPING[family]
