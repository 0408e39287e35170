"""Norms as exact as float32, where a training lets its own products be TF32.

TF32 keeps 11 bits of an operand's significand. Whoever cuts the rest off, as tensor cores do with
float32 as it lies in memory, finds every product up to 2^-9 too small, and a norm with them: a
sample would pass for smaller than it is, and exceed the clipping bound. So norms take no TF32
products of operands as they are:

* Triton's kernels take three instead of one ("tf32x3"). Each operand is rounded to the nearest
  TF32 number, and what that leaves off to another one; of the four products the smallest is left
  out. A product is then off by 3 x 2^-22 of its magnitude at most, up or down, which is about what
  float32 sums are off by.
* PyTorch's own products are IEEE float32.

A gradient that is kept and scaled is the training's own product: its norm is that of what is
released, in whichever precision it was made.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def allows_tf32() -> bool:
    """Tell whether PyTorch may round operands of float32 products to TF32 on CUDA."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def name_precision(dtype: torch.dtype) -> str:
    """Name, as Triton does, how products of a dtype are taken for norms."""
    return "tf32x3" if dtype is torch.float32 and allows_tf32() else "ieee"


@contextmanager
def exact_products() -> Iterator[None]:
    """Have PyTorch compute products of float32 in float32 within."""
    if not allows_tf32():
        yield
        return
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = "tf32"
