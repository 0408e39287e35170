"""Computes norms in float32 precision where training may use TF32 products.

TF32 keeps 11 bits of an operand's significand. Tensor cores truncate the rest of a float32 operand,
which can make every product, and the norm, up to 2^-9 too small: the sample would exceed the
clipping bound. So norms never use plain TF32 products:

* Triton's kernels use three products in place of one ("tf32x3"). Each operand is rounded to the
  nearest TF32 number, and so is the remainder; of the four products the smallest is dropped. The
  error is at most 3 x 2^-22 of a product's magnitude, about that of float32 sums.
* PyTorch's own products use IEEE float32.

Per-sample gradients that are kept and scaled are training's own products. Their norm is the norm of
what is released, in any precision.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from dpprof.private.substitutes import substitute

_NORMS = SimpleNamespace(are_exact=False)  # whether TF32 is off, which training uses


def allows_tf32() -> bool:
    """Tell whether training may use TF32 for float32 products on CUDA."""
    return _NORMS.are_exact or bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def convolutions_allow_tf32() -> bool:
    """Tell whether training may use TF32 for float32 convolutions on CUDA, as PyTorch's default."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def name_precision(dtype: torch.dtype) -> str:
    """Return Triton's name for the precision of products of a dtype in norms."""
    return "tf32x3" if dtype is torch.float32 and allows_tf32() else "ieee"


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute PyTorch's products, and not Triton's kernels, in float32 inside the context."""
    if _NORMS.are_exact or not allows_tf32():
        yield
        return
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = "ieee"
    try:
        with substitute(_NORMS, "are_exact", value=True):
            yield
    finally:
        matmul.fp32_precision = "tf32"
