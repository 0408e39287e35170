"""Registers the Triton kernels as PyTorch operators.

Dispatch modes, FLOP counters and fake tensors see an operator, but not a kernel launch. Its FLOPs
count the Gram tiles on and below the diagonal, or the product.

Shape legend: B samples, T tokens, d width of the input, p width of the output.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dpprof.private.norms.code_paths import Way
from dpprof.private.norms.float32_products import name_precision
from dpprof.private.norms.placement import is_simulated

KERNELS = {Way.TILED_GRAM: "gram_squares", Way.TILED_PRODUCT: "product_squares"}
"""The kernel of each way to a norm."""

_tiles: dict[tuple[str, int, int, int], dict[str, int]] = {}  # of a last run, by T, d and p
_is_faster: dict[tuple[str, int, int, int], bool] = {}  # than products, by T, d and p


@functools.cache
def why_no_kernels() -> str | None:
    """Say why kernels cannot run on this machine's GPU; None if they can.

    Triton compiles a part of its driver at first use. Without a C compiler and Python's headers
    the first kernel would end the training, so this tries it, once in a process with a CUDA tensor.
    """
    try:
        importlib.import_module("triton.runtime").driver.active.utils  # noqa: B018 (it compiles)
    except ModuleNotFoundError:
        return "Triton is not installed"
    except Exception as error:  # noqa: BLE001 (of compilers, linkers, loaders and drivers)
        first_line = next(iter(str(error).splitlines()), "")
        return f"Triton's driver cannot be used: {type(error).__name__}: {first_line}"
    return None


def explain_missing_tiles() -> dict[str, str]:
    """Say why norms on CUDA used PyTorch's operators in place of kernels, if they did."""
    has_asked = why_no_kernels.cache_info().currsize
    reason = why_no_kernels() if has_asked else None
    if reason is None and not all(_is_faster.values()):
        reason = "PyTorch's products were faster than the kernel, where there are no tiles"
    return {} if reason is None else {"norm_plan.tiles": reason}


def chosen_tiles(way: Way, T: int, d: int, p: int) -> dict[str, int] | None:
    """Return the configuration that tuning chose for a kernel; None if it has not run."""
    return _tiles.get((KERNELS.get(way, way), T, d, p))


def is_fused(x: Tensor) -> bool:
    """Tell whether a kernel can run on a tensor: on CUDA, with Triton, not in float64."""
    can_run = is_simulated() or (x.is_cuda and why_no_kernels() is None)
    return can_run and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def is_faster(way: Way, x_BTd: Tensor, g_BTp: Tensor, by_products: Callable[[], object]) -> bool:
    """Tell whether a kernel is faster than PyTorch's products; times both once for each shape.

    Only exact float32 is timed: it uses no tensor cores, and cuBLAS may be faster. In other cases,
    and in an estimate, the kernel counts as faster.
    """
    uses_tensor_cores = x_BTd.dtype != torch.float32 or name_precision(x_BTd.dtype) != "ieee"
    if uses_tensor_cores or isinstance(x_BTd, FakeTensor) or not len(x_BTd):
        return True
    kernel = KERNELS[way]
    key = (kernel, *x_BTd.shape[1:], g_BTp.shape[2])
    if key not in _is_faster:
        from dpprof.private.norms.tuning import time_launch  # noqa: PLC0415 (it imports triton)

        ways = (lambda: _run(kernel, x_BTd, g_BTp), by_products)
        of_kernel, of_products = (time_launch(run, [0.5])[0] for run in ways)
        _is_faster[key] = of_kernel <= of_products
        if not _is_faster[key]:
            del _tiles[key]
    return _is_faster[key]


def launch(operator: Any, *arguments: Any) -> Any:
    """Run an operator; its function alone, which takes half as long, where nobody looks."""
    is_watched = (
        type(arguments[0]) is not Tensor
        or torch._C._len_torch_dispatch_stack()  # noqa: SLF001 (these have no public names)
        or torch._C._autograd._profiler_enabled()  # noqa: SLF001
        or torch.compiler.is_compiling()
    )
    return (operator if is_watched else operator._init_fn)(*arguments)  # noqa: SLF001


@torch.library.custom_op("dpprof::gram_squares", mutates_args=())
def gram_squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Compute squared norms from Gram matrices in registers, their traces and squares; (5, B)."""
    return _run("gram_squares", x_BTd, g_BTp)


@torch.library.custom_op("dpprof::product_squares", mutates_args=())
def product_squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Compute squared norms from gradients in registers; (B,) in float32."""
    return _run("product_squares", x_BTd, g_BTp)


def _launchers() -> Any:
    from dpprof.private.norms import triton_launch  # noqa: PLC0415 (it imports triton)

    return triton_launch


def _run(kernel: str, x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    squares: Tensor
    squares, config = _launchers().launch_squares(kernel, x_BTd, g_BTp)
    if config is not None:
        _tiles[kernel, *x_BTd.shape[1:], g_BTp.shape[2]] = config
    return squares


@torch.library.custom_op("dpprof::scale_gradients", mutates_args=())
def scale_gradients(
    x_BTd: Tensor, g_BTd: Tensor, mean_BT: Tensor | None, rstd_BT: Tensor, shifted: bool
) -> Tensor:
    """Compute a scale's gradients in one pass; (B, 1, d), or with the shift's, (B, 2, d)."""
    operands = (x_BTd, g_BTd, mean_BT, rstd_BT)
    sums_BRd: Tensor = _launchers().launch_scale_gradients(*operands, shifted=shifted)
    return sums_BRd


@torch.library.custom_op("dpprof::weigh", mutates_args=())
def weigh(x_BTd: Tensor, weights_B: Tensor) -> Tensor:
    """Multiply samples by weights, (B,), in one pass; (B, T, d) in the dtype of ``x_BTd``."""
    weighed_BTd: Tensor = _launchers().launch_weigh(x_BTd, weights_B)
    return weighed_BTd


@weigh.register_fake
def _weighed(x_BTd: Tensor, _weights_B: Tensor) -> Tensor:
    return x_BTd.new_empty(x_BTd.shape)


@torch.library.custom_op("dpprof::differentiate_cross_entropy_", mutates_args={"z_NV"})
def differentiate_cross_entropy_(  # noqa: PLR0917 (an operator's options are positional)
    z_NV: Tensor,
    labels_N: Tensor,
    incoming_N: Tensor | None,
    ignored: int,
    smoothing: float,
    scale: float,
    cap: float | None,
) -> Tensor:
    """Put gradients in the place of logits, and return the losses, (N,) in float32, in one pass."""
    options: Any = {"ignored": ignored, "smoothing": smoothing, "scale": scale, "cap": cap}
    losses_N: Tensor = _launchers().launch_cross_entropy(z_NV, labels_N, incoming_N, **options)
    return losses_N


@torch.library.custom_op("dpprof::add_noise_", mutates_args={"summed"})
def add_noise_(summed: Tensor, words: Tensor, which: int, std: float, factor: float) -> None:
    """Multiply a sum by a factor and add normal noise, in one pass and in place.

    The noise follows from ``words``, a seed and a digest, and from ``which`` sum of them this is.
    """
    _launchers().launch_noise(summed, words, which, std, factor)


@torch.library.custom_op("dpprof::digest_", mutates_args={"words"})
def digest_(words: Tensor, sums: list[Tensor], table: Tensor) -> None:
    """Hash sums, (n,) int32 each, with secret numbers to 64 bits: the second of the words."""
    _launchers().launch_digest(words, sums, table)


for _in_place in (add_noise_, digest_):
    _in_place.register_fake(lambda *_: None)

SCALE = torch.ops.dpprof.scale_gradients
WEIGH = torch.ops.dpprof.weigh
CROSS_ENTROPY = torch.ops.dpprof.differentiate_cross_entropy_
DIGEST = torch.ops.dpprof.digest_
NOISE = torch.ops.dpprof.add_noise_  # the functions above as PyTorch's operators

LAUNCHES = dict.fromkeys((f"dpprof.{name}" for name in (*KERNELS.values(), "scale_gradients")), 2)
"""Kernels that each operator launches: its own, and one that adds up the sums of its programs."""


@scale_gradients.register_fake
def _sums_by_column(
    x_BTd: Tensor, _g_BTd: Tensor, _mean_BT: Tensor | None, _rstd_BT: Tensor, shifted: bool
) -> Tensor:
    shape = (x_BTd.shape[0], 2 if shifted else 1, x_BTd.shape[2])
    return x_BTd.new_empty(shape, dtype=torch.float32)


@gram_squares.register_fake
def _sums_of(x_BTd: Tensor, _g_BTp: Tensor) -> Tensor:
    return x_BTd.new_empty((5, len(x_BTd)), dtype=torch.float32)


@product_squares.register_fake
@differentiate_cross_entropy_.register_fake
def _number_each(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(len(x), dtype=torch.float32)


@register_flop_formula(torch.ops.dpprof.gram_squares)
def _gram_flops(x_BTd: Any, g_BTp: Any, **_: Any) -> int:
    B, T, d = x_BTd
    return int(B * T * (T + 1) * (d + g_BTp[2]))


@register_flop_formula(torch.ops.dpprof.product_squares)
def _product_flops(x_BTd: Any, g_BTp: Any, **_: Any) -> int:
    B, T, d = x_BTd
    return int(2 * B * T * d * g_BTp[2])
