"""Squared norms of the per-sample gradients of a linear layer's weight, and gradients of a scale.

The gradient of sample b is G_b^T X_b, of p x d elements, for inputs X and gradients G of the
outputs. Two Triton kernels sum its squares, tile by tile in registers: one from the Gram
matrices of the tokens, T^2 (d + p) / 2 multiply-adds a sample, one from the product itself, T d p.
Neither writes anything of T x T or d x p; what they allocate is one or three float32 for each of
about `PROGRAMS` programs and the result. A third makes the per-sample gradients of a
normalisation's scale, which are a vector each, in one pass over inputs and output gradients.

Importing this needs the extra ``triton``. The tensors are on a CUDA device, or on a CPU if the
process interprets Triton (``TRITON_INTERPRET=1``). A launch is no operator of torch: dispatch
modes, fake tensors and autograd see only the allocation and the last sum.

Source of the Gram form: Goodfellow, "Efficient Per-Example Gradient Computations" (2015), for
T = 1; Li et al., "Large Language Models Can Be Strong Differentially Private Learners" (2022),
for sequences.

Shapes: B batch, T tokens, d in, p out, N sums, S slots of partial sums.
"""

from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from dpprof.norms.float32_products import name_precision
from dpprof.norms.triton_kernels import sum_gram_squares, sum_product_squares, sum_scaled
from dpprof.norms.tuning import GRAM, INTERPRETED, PRODUCT, SCALED

PROGRAMS = 1024
"""How many programs share the tiles of a batch, at least one for each sample: about eight for
each of an H200's 132 multiprocessors. Each loops over its tiles and writes one partial sum, so
partial sums take 12 (PROGRAMS + B) bytes at most, however long the sequences."""

_AXES = 3
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def gram_squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Square the norm of each sample's weight gradient, from Gram matrices of its tokens.

    The sum of (x_t . x_s) (g_t . g_s) over all tokens t, s. Its terms have both signs: where the
    tokens' gradients cancel, rounding leaves an error relative to (sum_t |x_t| |g_t|)^2 and not
    to the result; it may be below zero. The squares of both Gram matrices, in passing, bound it.

    Args:
        x_BTd: Inputs of the layer, (B, T, d), with any strides; bfloat16, float16 or float32.
        g_BTp: Gradients of the loss in its outputs, (B, T, p), likewise and of the same dtype.

    Returns:
        (3, B) in float32, inf where that is too small: the squared norms, the sums of
        (x_t . x_s)^2, and of (g_t . g_s)^2. Products of float32 are exact, or three of
        TF32 each where PyTorch may use TF32 (``norms.float32_products``); sums are float32.

    Raises:
        TypeError: The dtypes differ, or are others, such as float64.
        ValueError: Shapes or devices do not fit.
    """
    _check(x_BTd, g_BTp)
    side = cdiv(x_BTd.shape[1], min(config.kwargs["TILE_T"] for config in GRAM))
    return _launch(sum_gram_squares, x_BTd, g_BTp, side * (side + 1) // 2, sums=3)


def product_squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Square the norm of each sample's weight gradient, from its tiles.

    Args:
        x_BTd: Inputs of the layer, (B, T, d), with any strides; bfloat16, float16 or float32.
        g_BTp: Gradients of the loss in its outputs, (B, T, p), likewise and of the same dtype.

    Returns:
        (B,) in float32, inf where that is too small. Products of float32 are exact, or three of
        TF32 each where PyTorch may use TF32 (``norms.float32_products``); sums are float32.

    Raises:
        TypeError: The dtypes differ, or are others, such as float64.
        ValueError: Shapes or devices do not fit.
    """
    _check(x_BTd, g_BTp)
    height = cdiv(x_BTd.shape[2], min(config.kwargs["TILE_D"] for config in PRODUCT))
    width = cdiv(g_BTp.shape[2], min(config.kwargs["TILE_P"] for config in PRODUCT))
    return _launch(sum_product_squares, x_BTd, g_BTp, height * width, sums=1)[0]


def _check(x_BTd: Tensor, g_BTp: Tensor) -> None:
    if x_BTd.dtype != g_BTp.dtype or x_BTd.dtype not in _DTYPES:
        raise TypeError(
            "inputs and gradients must both be bfloat16, float16 or float32, "
            f"not {x_BTd.dtype} and {g_BTp.dtype}"
        )
    if x_BTd.dim() != _AXES or g_BTp.dim() != _AXES or x_BTd.shape[:2] != g_BTp.shape[:2]:
        raise ValueError(
            "inputs (B, T, d) and gradients (B, T, p) must agree in B and T, "
            f"not be {tuple(x_BTd.shape)} and {tuple(g_BTp.shape)}"
        )
    if x_BTd.device != g_BTp.device or x_BTd.is_cuda == INTERPRETED:
        place = "a CPU, as Triton is interpreted" if INTERPRETED else "one CUDA device"
        raise ValueError(
            f"inputs and gradients must be on {place}, not on {x_BTd.device} and {g_BTp.device}"
        )


def _launch(program: Any, x_BTd: Tensor, g_BTp: Tensor, tiles: int, *, sums: int) -> Tensor:
    """Run a program on a batch and add up what its slots hold; (sums, B).

    Args:
        program: The Triton program.
        x_BTd: Inputs.
        g_BTp: Gradients of outputs.
        tiles: Of a sample, at most.
        sums: How many a program writes.
    """
    B, T, d = x_BTd.shape
    p = g_BTp.shape[2]
    if B == 0:
        return x_BTd.new_zeros((sums, 0), dtype=torch.float32)
    slots = min(tiles, cdiv(PROGRAMS, B))
    partials_NBS = x_BTd.new_empty(sums, B, slots, dtype=torch.float32)
    with torch.cuda.device_of(x_BTd):  # type: ignore[no-untyped-call]
        program[(B * slots,)](
            x_BTd,
            g_BTp,
            partials_NBS,
            slots,
            *(T, d, p),
            *x_BTd.stride(),
            *g_BTp.stride(),
            *map(next_power_of_2, (T, d, p)),
            PRECISION=name_precision(x_BTd.dtype),
        )
    return partials_NBS.sum(dim=2)


def scale_gradients(
    x_BTd: Tensor, g_BTd: Tensor, mean_BT: Tensor | None, rstd_BT: Tensor
) -> Tensor:
    """Sum ``g * (x - mean) * rstd`` over tokens, for each sample.

    Args:
        x_BTd: Inputs of the normalisation, with any strides; bfloat16, float16 or float32.
        g_BTd: Gradients of its outputs, likewise; the dtypes may differ.
        mean_BT: What was subtracted, None for nothing.
        rstd_BT: What was multiplied by.

    Returns:
        (B, d) in float32; products and sums are float32.
    """
    B, T, d = x_BTd.shape
    if B == 0:
        return x_BTd.new_zeros((0, d), dtype=torch.float32)
    stripes = cdiv(d, SCALED.TILE_D)
    slots = min(cdiv(T, SCALED.TILE_T), cdiv(PROGRAMS, B * stripes))
    partials_BSd = x_BTd.new_empty(B, slots, d, dtype=torch.float32)
    rstd_BT = rstd_BT.float().contiguous()
    centred = mean_BT is not None
    with torch.cuda.device_of(x_BTd):  # type: ignore[no-untyped-call]
        sum_scaled[B, slots, stripes](
            x_BTd,
            g_BTd,
            mean_BT.float().contiguous() if mean_BT is not None else rstd_BT,
            rstd_BT,
            partials_BSd,
            *(slots, T, d),
            *x_BTd.stride(),
            *g_BTd.stride(),
            CENTRED=centred,
            **SCALED._asdict(),
            num_warps=8,
        )
    return partials_BSd.sum(dim=1)


def tell_tiles(kernel: str) -> dict[str, int]:
    """Tell the configuration with which a kernel ran last, under Triton's names for its parts."""
    config = {"gram_squares": sum_gram_squares, "product_squares": sum_product_squares}[
        kernel
    ].best_config
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
