"""Launches the Triton kernels of ``norms.triton_kernels``.

The norm kernels need T^2 (d + p) / 2 (Gram) or T d p (product) multiply-adds for each sample. They
allocate one or three float32 for each of about `tuning.PROGRAMS` programs, and the result.

Needs the extra ``triton``, and tensors on a CUDA device, or on a CPU if the process interprets
Triton (``TRITON_INTERPRET=1``). A launch is not an operator of torch: dispatch modes, fake tensors
and autograd see only the allocation and the last sum.

Shapes: B batch, T tokens, d in, p out, N sums, S slots of partial sums.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import Config, cdiv, next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from dpprof.private.norms import triton_kernels, triton_passes, tuning
from dpprof.private.norms.float32_products import name_precision
from dpprof.private.norms.tuning import INTERPRETED

_FEW_PROCESSORS = 7  # of Triton's interpreter: small inputs have several rounds

_AXES = 3
_COPY_ENGINE = 9
_HALF_BYTES = 2
_WORD_BYTES = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def launch_squares(
    kernel: str, x_BTd: Tensor, g_BTp: Tensor
) -> tuple[Tensor, dict[str, int] | None]:
    """Compute the squared norms of per-sample weight gradients.

    In ``gram_squares`` terms of both signs may cancel, so the rounding error is relative to
    (sum_t |x_t| |g_t|)^2, and a result may be below zero. The squares of both Gram matrices bound
    the error (``norms.rounding``).

    Args:
        kernel: ``gram_squares`` or ``product_squares``.
        x_BTd: Inputs of the layer, (B, T, d), with any strides; bfloat16, float16 or float32.
        g_BTp: Output gradients, (B, T, p), with any strides and the same dtype.

    Returns:
        In float32, inf at overflow: of ``product_squares`` the squared norms, (B,); of
        ``gram_squares`` also the sums of x_t . x_t, of g_t . g_t, of (x_t . x_s)^2, and of
        (g_t . g_s)^2, (5, B). ``norms.float32_products`` says how float32 is multiplied.
        And the kernel's configuration under Triton's names; None if there is no sample.

    Raises:
        TypeError: The dtypes differ or are not supported, such as float64.
        ValueError: Shapes or devices do not fit.
    """
    _check(x_BTd, g_BTp)
    if kernel == "product_squares":
        tiles = _count(x_BTd.shape[2], "TILE_D", tuning.PRODUCT)
        tiles *= _count(g_BTp.shape[2], "TILE_P", tuning.PRODUCT)
        squares_1B = _launch(triton_kernels.sum_product_squares, x_BTd, g_BTp, tiles, sums=1)
        return squares_1B[0], _name_best(triton_kernels.sum_product_squares, x_BTd)
    side = _count(x_BTd.shape[1], "TILE_T", tuning.GRAM)
    tiles = side * (side + 1) // 2
    more: dict[str, Any] = {"processors": _count_processors(x_BTd.device), "DESCRIBED": False}
    if not _is_described(x_BTd, g_BTp):
        sums_5B = _launch(triton_kernels.sum_gram_squares, x_BTd, g_BTp, tiles, sums=5, **more)
        return sums_5B, _name_best(triton_kernels.sum_gram_squares, x_BTd)
    config = _name(tuning.DESCRIBED)
    more |= {"DESCRIBED": True, "EVEN": True, **config}
    sums_5B = _launch(triton_kernels.sum_gram_squares.fn.fn, x_BTd, g_BTp, tiles, sums=5, **more)
    return sums_5B, config if len(x_BTd) else None


def _is_described(*operands: Tensor) -> bool:
    """Tell whether the kernel of Gram matrices reads both operands by tensor descriptors.

    The copy engine of a GPU of compute capability 9 loads their blocks. It wants rows that begin on
    16 bytes, in one matrix of all samples. On later GPUs the kernel would spill registers.
    """
    return _has_copy_engine(operands[0].device) and all(map(_can_describe, operands))


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return INTERPRETED or torch.cuda.get_device_capability(device)[0] == _COPY_ENGINE


def _can_describe(x_BTd: Tensor) -> bool:
    B, T, d = x_BTd.shape
    sample, row, column = x_BTd.stride()
    return (
        x_BTd.element_size() == _HALF_BYTES
        and tuning.DESCRIBED_TOKENS <= T
        and B * T < 2**31
        and column == 1
        and row >= d
        and (sample == T * row or B == 1)
        and (row * _HALF_BYTES) % _WORD_BYTES == x_BTd.data_ptr() % _WORD_BYTES == 0
    )


def _name(config: Config) -> dict[str, int]:
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _name_best(program: Any, x_BTd: Tensor) -> dict[str, int] | None:
    return _name(program.best_config) if len(x_BTd) else None


@functools.cache
def _count_processors(device: torch.device) -> int:
    if INTERPRETED:
        return _FEW_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _count(length: int, side: str, configs: list[Config]) -> int:
    return int(cdiv(length, min(config.kwargs[side] for config in configs)))


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


def _launch(
    program: Any, x_BTd: Tensor, g_BTp: Tensor, tiles: int, *, sums: int, **more: Any
) -> Tensor:
    """Run a kernel of at most ``tiles`` tiles for each sample, and add up its slots; (sums, B)."""
    B, T, d = x_BTd.shape
    p = g_BTp.shape[2]
    if B == 0:
        return x_BTd.new_zeros((sums, 0), dtype=torch.float32)
    slots = min(tiles, cdiv(tuning.PROGRAMS, B))
    partials_NBS = x_BTd.new_empty(sums, B, slots, dtype=torch.float32)
    operands: list[Any] = [x_BTd, g_BTp]
    if more.get("DESCRIBED"):
        block = [tuning.DESCRIBED.kwargs["TILE_T"], tuning.DESCRIBED.kwargs["TILE_K"]]
        operands = [
            TensorDescriptor(x, [B * T, x.shape[2]], [x.stride(1), 1], block) for x in operands
        ]
    with torch.cuda.device_of(x_BTd):  # type: ignore[no-untyped-call]
        program[(B * slots,)](
            *(*operands, partials_NBS, slots, T, d, p),
            *(*x_BTd.stride(), *g_BTp.stride(), *map(next_power_of_2, (T, d, p))),
            PRECISION=name_precision(x_BTd.dtype),
            **more,
        )
    return partials_NBS.sum(dim=2)


def _start(
    program: Any, programs: int | tuple[int, ...], arguments: Sequence[Any], **sizes: Any
) -> None:
    """Run a kernel that reads its first argument once or twice, on that one's device."""
    grid = programs if isinstance(programs, tuple) else (programs,)
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        program[grid](*arguments, **sizes, num_warps=8)


def launch_scale_gradients(
    x_BTd: Tensor, g_BTd: Tensor, mean_BT: Tensor | None, rstd_BT: Tensor, *, shifted: bool
) -> Tensor:
    """Sum ``g * (x - mean) * rstd`` over tokens, as in ``norms.scale``; (B, 1, d) in float32.

    ``x_BTd`` and ``g_BTd`` may have any strides, and each be bfloat16, float16 or float32. If
    ``shifted``, the sums of ``g`` follow; (B, 2, d).
    """
    B, T, d = x_BTd.shape
    rows = 2 if shifted else 1
    if B == 0:
        return x_BTd.new_zeros((0, rows, d), dtype=torch.float32)
    stripes = cdiv(d, tuning.SCALED["TILE_D"])
    slots = min(cdiv(T, tuning.SCALED["TILE_T"]), cdiv(tuning.PROGRAMS, B * stripes))
    partials_BSRd = x_BTd.new_empty(B, slots, rows, d, dtype=torch.float32)
    rstd_BT = rstd_BT.float().contiguous()
    of_tokens = (rstd_BT if mean_BT is None else mean_BT.float().contiguous(), rstd_BT)
    arguments = (x_BTd, g_BTd, *of_tokens, partials_BSRd, slots, T, d)
    options = {"CENTRED": mean_BT is not None, "SHIFTED": shifted, **tuning.SCALED}
    strides = (*x_BTd.stride(), *g_BTd.stride())
    _start(triton_passes.sum_scaled, (B, slots, stripes), (*arguments, *strides), **options)
    return partials_BSRd.sum(dim=1)


def launch_weigh(x_BTd: Tensor, weights_B: Tensor) -> Tensor:
    """Multiply samples by their weights in float32, and round to their dtype; (B, T, d).

    The samples are bfloat16, float16 or float32, and their elements lie side by side; the weights
    are float32, (B,).
    """
    B, T, d = x_BTd.shape
    y_BTd = x_BTd.new_empty(B, T, d)
    blocks = cdiv(T * d, tuning.WEIGHED["BLOCK"])
    if y_BTd.numel():
        arguments = (x_BTd, weights_B.contiguous(), y_BTd, blocks, T * d, x_BTd.stride(0))
        _start(triton_passes.weigh, B * blocks, arguments, **tuning.WEIGHED)
    return y_BTd


def launch_cross_entropy(
    z_NV: Tensor,
    labels_N: Tensor,
    incoming_N: Tensor | None,
    *,
    ignored: int,
    smoothing: float,
    scale: float,
    cap: float | None,
) -> Tensor:
    """Put gradients of losses in the place of logits, and return the losses; (N,) in float32.

    Logits have no gaps, in bfloat16, float16 or float32; labels are (N,) int64, of rows without
    a loss ``ignored``. Gradients of each row are multiplied by ``incoming_N``; logits by
    ``scale``, and then bounded as ``cap * tanh(z / cap)``.
    """
    N, V = z_NV.shape
    losses_N = z_NV.new_empty(N, dtype=torch.float32)
    if z_NV.numel():
        is_weighted = incoming_N is not None
        incoming_N = incoming_N.contiguous() if incoming_N is not None else labels_N
        options = {"CAPPED": cap is not None, "WEIGHTED": is_weighted, **tuning.LOGITS}
        numbers = (V, ignored, smoothing, scale, 1.0 if cap is None else cap)
        arguments = (z_NV, labels_N.contiguous(), incoming_N, losses_N, *numbers)
        _start(triton_passes.differentiate_cross_entropy, N, arguments, **options)
    return losses_N


def launch_noise(summed: Tensor, words: Tensor, which: int, std: float, factor: float) -> None:
    """Multiply a sum by a factor, and add normal noise of standard deviation ``std``, in place.

    The sum is in float32, without gaps, of fewer than 2^34 elements, which the counter tells
    apart (``ValueError``). ``words`` are a cipher's key and a part of its counter, (2,) int64.
    Two sums of the same words and number, ``which``, below 2^31, get the same noise.
    """
    n = summed.numel()
    if n >= 2**34:
        raise ValueError(f"a parameter has {n:,} elements, and noise is for less than 2^34")
    if n:
        programs, group = cdiv(n, 4 * tuning.GROUP), tuning.GROUP
        arguments = (summed, words, which, n, std, factor)
        _start(triton_passes.add_normal, programs, arguments, GROUP=group)


def launch_digest(words: Tensor, sums: Sequence[Tensor], table: Tensor) -> None:
    """Hash sums, (n,) int32 each without gaps, to 64 bits: the second of the words, (2,) int64.

    The ``table`` has secret numbers on the same device, more than ``HASHED``, int64.
    """
    words.data[1].zero_()  # the operator counts as one change
    for which, each in enumerate(sums):
        if len(each):
            programs, group = cdiv(len(each), tuning.HASHED), tuning.HASHED
            arguments = (each, table, words, which, len(each))
            _start(triton_passes.add_digest, programs, arguments, GROUP=group)
