"""The ways to a layer's per-sample gradients, or to their norms."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal, Self, get_args

SamplerOutput = Literal["gradients", "norms"]


class CodePath(StrEnum):
    """A way to a layer's per-sample gradients, or to their norms.

    A subclass defines each member by its name in results and what it makes.

    Example:
        >>> class ByRows(CodePath):
        ...     SORTED = "sorted rows", "norms"
        >>> ByRows.SORTED.makes
        'norms'
    """

    makes: SamplerOutput

    def __new__(cls, name: str, makes: SamplerOutput) -> Self:
        """Make a member; ``makes`` is one of ``SamplerOutput``, or ``ValueError`` is raised."""
        if makes not in get_args(SamplerOutput):
            raise ValueError(
                f"{name!r} must make one of {get_args(SamplerOutput)}, and not {makes!r}"
            )
        member = str.__new__(cls, name)
        member._value_ = name
        member.makes = makes
        return member


Watch = Callable[[Any, CodePath, Callable[..., Any], tuple[Any, ...]], Any]
"""Called with a layer, its code path, the sampler that computes the layer's per-sample gradients
or norms, and the sampler's arguments; must return the sampler's result for them."""


def finds_norms(path: CodePath) -> bool:
    """Tell whether a way, and no plain string, finds norms without per-sample gradients."""
    if not isinstance(path, CodePath):
        raise TypeError(
            f"the code path {path!r} does not say what it makes; give a member of a subclass of "
            "dpprof.private.norms.code_paths.CodePath"
        )
    return path.makes == "norms"


class Way(CodePath):
    """The ways of ``dpprof.private``."""

    TILED_GRAM = "tiled gram", "norms"  # of ``norms.linear``
    TILED_PRODUCT = "tiled product", "norms"  # likewise
    KEPT = "kept product", "gradients"  # a matrix's, until the clipping factors are known
    DIRECT = "sample gradients", "gradients"  # small, or with no other way
    SUMMED = "sums of rows", "norms"  # the norm of a lookup table's gradient, from ``norms.table``
    CROSSED = "cross terms", "norms"  # of a matrix that is a table too, from ``norms.table``
