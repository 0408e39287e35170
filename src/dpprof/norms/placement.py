"""Where a tensor is, as far as that decides how it is worked on.

One function for all who ask, by the name of this module: what predicts a GPU's step without one
has it answer as there.
"""

from torch import Tensor


def is_cuda(x: Tensor) -> bool:
    """Tell whether a tensor is where launches are dear, and tensor cores multiply 16 bits."""
    return x.is_cuda
