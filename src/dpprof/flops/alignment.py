"""Whether tensor cores can load a matrix by whole words."""

from torch import Tensor

_WORD_BYTES = 16


def is_aligned(matrix: Tensor) -> bool:
    """Return whether all rows of a matrix begin on 16 bytes, by whichever of its axes is dense."""
    rows = [step for step in matrix.stride()[-2:] if step != 1]
    return matrix.dim() < 2 or all(  # noqa: PLR2004 (vectors have no rows)
        step * matrix.element_size() % _WORD_BYTES == 0 for step in rows
    )
