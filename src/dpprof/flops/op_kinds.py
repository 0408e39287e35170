"""Op kinds: what an operator's work is for, by its family, its phase and its caller.

Recorded bytes and traced times are summed by the same kinds, so bytes can be divided by seconds.
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
    "optimizer",
    "communication",
    "other",
]
"""What an operator does, whatever calls it."""

Scope = Literal["norm", "einsum"]
"""The caller: a search for norms of per-sample gradients, or ``torch.einsum``."""

EINSUMS = ("einsum", "tensordot")
"""Functions of torch that contract axes by calling other operators."""

_ALWAYS: dict[Family, OpKind] = {
    "norm": "norm",
    "attention": "attention",
    "matmul": "gemm",
    "indexing": "indexing",
    "random": "random",
    "optimizer": "optimizer",
}
_UNLESS_CLIPPING: dict[Family, OpKind] = {
    "elementwise": "elementwise",
    "reduction": "reduce",
    "copy": "copy",
    "other": "other",
}


def kind_of_op(family: Family, phase: Phase | None, scope: Scope | None) -> OpKind:
    """Return the kind of an operator.

    Communication between devices is ``communication`` everywhere. All other operators of a search
    for norms are ``norm``, others of the phase step ``optimizer``, and others of a contraction
    ``einsum``. The rest have a kind by their family; in the phase clip,
    ``clip`` for elementwise operators, reductions and copies.

    Args:
        family: What the operator does.
        phase: In which phase; None if that is not known.
        scope: The caller.
    """
    if family == "communication":
        return "communication"
    if scope == "norm":
        return "norm"
    if phase == "step":
        return "optimizer"
    if scope == "einsum":
        return "einsum"
    if family in _ALWAYS:
        return _ALWAYS[family]
    return "clip" if phase == "clip" else _UNLESS_CLIPPING[family]
