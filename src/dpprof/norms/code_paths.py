"""Ways from a layer to what is clipped, and what each makes: gradients or norms alone."""

from enum import StrEnum
from typing import Literal, Self, get_args

Made = Literal["gradients", "norms"]


class CodePath(StrEnum):
    """A way to a layer's per-sample gradients, or to their norms.

    Members are of subclasses, each written as its name in results and what it makes.

    Example:
        >>> class ByRows(CodePath):
        ...     SORTED = "sorted rows", "norms"
        >>> ByRows.SORTED.makes
        'norms'
    """

    makes: Made

    def __new__(cls, name: str, makes: Made) -> Self:
        """Make a member.

        Raises:
            ValueError: It makes something else than gradients or norms.
        """
        if makes not in get_args(Made):
            raise ValueError(f"{name!r} must make one of {get_args(Made)}, and not {makes!r}")
        member = str.__new__(cls, name)
        member._value_ = name
        member.makes = makes
        return member


def finds_norms(path: CodePath) -> bool:
    """Tell whether a way finds norms, without making per-sample gradients.

    Raises:
        TypeError: It is a plain name, which does not say what it makes.
    """
    if not isinstance(path, CodePath):
        raise TypeError(
            f"the code path {path!r} does not say what it makes; give a member of a subclass of "
            "dpprof.norms.code_paths.CodePath"
        )
    return path.makes == "norms"


class Way(CodePath):
    """The ways of ``dpprof.clipping``."""

    MATERIALISED = "materialised", "norms"
    GRAM = "gram", "norms"
    TILED_GRAM = "tiled gram", "norms"
    TILED_PRODUCT = "tiled product", "norms"
    """These four are of a matrix, as ``norms.linear`` says; what the first makes is gone at once,
    so it counts as a search for norms."""

    KEPT = "kept product", "gradients"
    """Of a matrix: the gradient is made, and kept until samples are weighted."""

    MADE = "sample gradients", "gradients"
    """Of what is small for each sample, or has no other way: it is made."""

    SUMMED = "sums of rows", "norms"
    """Of a lookup table."""

    CROSSED = "cross terms", "norms"
    """Of a matrix that is used as a table too."""
