"""How long operators take on a GPU, which need not be present.

Matrix products take measured speeds if the device or its architecture has a table. All other times
rest on the data sheet: a kernel reaches the share of a peak that kernels of its kind are known to
reach. Each share below has its source and its uncertainty.
"""

import math
from typing import NamedTuple

from dpprof.experiments.config import datasheets
from dpprof.experiments.config.target import Dtype, Target, ceiling_of
from dpprof.predict.flops.cost import COUNTED, AttentionShape, Cost, ProductShape
from dpprof.predict.step_time.op_time import OpTime, UnknownTimeError
from dpprof.predict.step_time.product_table import (
    PeakRates,
    ProductTable,
    bound_s,
    read_product_table,
)

_TABLES = ("a100", "b200", "h100", "h200", "l40s")
MEASURED: dict[Target, str] = {getattr(datasheets, name.upper()): name for name in _TABLES}
"""Devices with a table of their own."""

_OF_ARCHITECTURE = {"8.0": "a100", "8.9": "l40s", "9.0": "h100", "10.0": "b200"}
"""The table whose shares other devices take, by compute capability."""

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


class Estimate(NamedTuple):
    """A figure, such as the share of a peak that kernels reach, and how uncertain it is."""

    value: float
    spread: float  # standard deviation of its logarithm


MEMORY = Estimate(0.88, 0.1)
"""Share of bandwidth of elementwise operators and copies. On an H100 they reach 0.82 to 0.90 from
2^24 elements on (perf/measured_steps.md, which has all figures that are measured here)."""

WIDENING = Estimate(0.58, 0.1)
"""Share of bandwidth of copies of 16 bits to float32: measured in bfloat16, 0.57 to 0.59."""

OPTIMIZERS = Estimate(0.78, 0.1)
"""Share of bandwidth of operators on all parameters at once: measured, 0.69 to 0.84."""

NOISE = Estimate(0.84, 0.1)
"""Share of bandwidth of the kernel that draws noise and adds it: measured."""

_BY_FAMILY: dict[str, Estimate] = {
    "random": Estimate(0.47, 0.15),
    "reduction": Estimate(0.62, 0.2),
    "optimizer": OPTIMIZERS,
    "indexing": Estimate(0.3, 0.5),
}
"""Share of bandwidth by family. Normal random numbers are bound by arithmetic and not by memory:
measured, 0.46 to 0.49. Softmax, normalisation, sums and their backward passes were measured to
reach 0.39 to 0.70, and scatters, which count as lookups and gathers, 0.23 to 0.36."""

_READ_AGAIN = 0.6
"""The share of an operator that reads its operands again (``Cost.reads_again``), over that of
others of its family: of an input, an output gradient and a result all but the result are moved
twice. Measured: gradients of layer norms reach 0.36 to 0.38 of the bandwidth, of root mean square
norms 0.39 to 0.41; without those of the scale 0.53 to 0.80."""

_BANDWIDTH = {"7.5": 0.82}
"""What copies reach of a bandwidth on these architectures, over what they reach elsewhere.

On a T4, whose memory holds the codes of its error correction too: 220 GB/s of 320 (Jia et al. 2019,
"Dissecting the NVidia Turing T4 GPU via Microbenchmarking") and 239.6 (NVIDIA's bandwidthTest,
router-gao/cuda-demo), a share of 0.72 beside ``MEMORY``.
"""

_FLOAT32 = {"7.0": 0.89, "7.5": 0.53, "8.0": 0.85, "8.6": 0.65, "8.9": 0.63, "9.0": 0.78}
"""Share of the peak of large products in float32, by compute capability.

zzc0721/torch-performance-test-data: ``torch.matmul`` of 4,096 and 8,192 rows and columns on an A100
PCIe (issue 108), an RTX 4090 (78), an L20 (107) and an H100 (79); and its table of the best of
several sizes: V100 13.6 and 14.5 TFLOPS (issue 140) of 15.7, T4 4.2 and 4.4 of 8.1, RTX 3090 24.8
of 35.6, A6000 23.9 of 38.7, A40 23.7 of 37.4. A T4's 70 W do not carry its boost clock.
"""

_TF32 = 0.8
"""Share of the peak of large products in TF32: the same issues give 0.73 to 0.91 for A100 and
H100."""

_OTHER_SPREAD = 0.2  # the spread of products in float32, TF32 and float64

MISALIGNED = Estimate(0.45, 0.4)
"""Speed of products on tensor cores whose rows do not begin on 16 bytes, over that of others.

nanoGPT became about 25 % faster when its vocabulary grew from 50,257 to 50,304 (x.com/karpathy,
3 February 2023), and a compiled GPT-2 30 % on an A100 when matrices were padded (issue 1129 of
intel/torch-xpu-ops). Products with a side of the vocabulary are about 0.27 of its FLOPs.
"""

UNKNOWN_PRODUCTS = Estimate(0.6, 0.35)
"""Share of the roofline of products on a device without a table of its architecture, and of other
products, such as those of a norm by tiled gradients."""

CONVOLUTIONS = Estimate(0.7, 0.4)
"""Speed of a convolution over that of the matrix products that it amounts to. It is a guess, and
its spread is wide: cuDNN chooses among implicit products, Winograd's and Fourier's algorithms, and
may have to change the layout of what it reads first."""

GRAMS = Estimate(0.39, 0.15)
"""Share of the peak of a norm by Gram matrices, in 16 bits, where a tile on the diagonal counts as
half of one. Measured on an H100: 0.36 for 8 samples of 1,024 tokens, 0.41 for 16, and 0.42 and 0.46
for 4 of 2,048 and 4,096. Few tiles leave processors idle in the last round."""

GRAMS_OF = {"9.0": Estimate(0.46, 0.15)}
"""Share of the peak of a norm by Gram matrices where the GPU's copy engine loads the blocks
(``norms.triton_launch``)."""

GRAMS_IN_TF32 = Estimate(0.27, 0.25)
"""Share of the peak of a norm by Gram matrices in TF32, of three products in place of each
(``norms.float32_products``): measured."""

TF32_PRODUCTS = 3  # products in TF32 in place of each of a norm's (``norms.float32_products``)

KERNEL_S = 3e-6
"""Seconds of a kernel beyond its work: ``mem_empirical_constant_latency`` of the same source."""

HOST_S = Estimate(33e-6, 0.35)
"""Seconds of the host for an operator that has work: Python, modules, dispatch, autograd, launch.

The median of four machines. Three ran the small transformer of a course (Stanford CS336, 12 layers,
4 samples) and waited for the host: 20 (forward and optimizer, RTX 5090), 27 (forward and backward,
L4) and 42 microseconds (the same, charliesabino/cs336-assignment2, whose GPU is not named). On the
fourth, with an H100, seven private and plain steps took 30 to 48, in the median 39
(perf/measured_steps.md).
"""

NO_HOST = Estimate(0.0, 0.0)
"""Seconds of the host for an operator in a CUDA graph, where kernels follow each other after
``KERNEL_S``. To start a graph takes the host about 2.5 microseconds and 1.5 ns for each node
(NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs", 2024), less than one operator of a
step."""

_FLASH: dict[str, tuple[float, float]] = {"8": (0.62, 0.5), "9": (0.38, 0.34), "10": (0.2, 0.175)}
"""Shares of the peak by FlashAttention-2, whose kernels PyTorch runs, over long sequences, forward
and backward, by the major compute capability.

A100: Dao 2023, "FlashAttention-2": 50 to 73 % forward and up to 63 % backward. H100: pull requests
1791 and 2688 of Dao-AILab/flash-attention. B200: issue 1589 there. It is also used for cuDNN's
attention, which newer versions of PyTorch prefer on an H100 or a B200 and which is faster there.
PyTorch's kernel for float32 was measured to reach 0.63 and 0.8 of the peak of float32 on an H100.
"""

CAUSAL = 0.82
"""Speed of attention that skips the masked half, over that without a mask: tiles on the diagonal
are computed whole, and processors end at different times.

Forward 0.77 (H100, flash-attention's pull request 1791), 0.79 and 0.87 (H20, its issue 1310), 0.84
and 0.89 (RTX 4090, apache/tvm's tl_doc/flash_perf.md); backward 0.77, 0.80 (RTX 4090), 0.99 (H100).
"""

_ATTENTION_SPREAD = 0.2
"""Twice that for architectures of which no figure was found; they take the A100's shares."""

_HALF_TOKENS = (100, 256)
"""The tokens with which attention forward and backward reaches half of its speed over long
sequences: flash-attention's pull request 2688 (H100) and issue 1589 (B200), 512 to 8,192 tokens."""

_FULL_WIDTH = 128
_NARROW = 0.85
"""Heads of half the width reach this share of the speed."""

_CLOCKS = 0.05  # spread of all times of a device together: clocks, cooling and drivers differ

_CLOCKS_OF = {"7.5": 0.25, "9.0": 0.1, "10.0": 0.1}
"""Spread of all times of a device together by compute capability, where power carries the clocks
for moments only. A T4's 70 W leave it between 585 and 1,590 MHz (data sheet; Jia et al. 2019 show
how it falls). With sides of at least 4,096, products of an H200 reach 0.79 of its peak with 2,048
rows and 0.71 with 32,768, those of an A100 0.83 and 0.81 (the tables)."""


def _share_of_bandwidth(cost: Cost) -> Estimate:
    if cost.op == "_to_copy" and cost.dtype in ("bfloat16", "float16"):
        return WIDENING
    if cost.op == "dpprof.add_noise_":
        return NOISE
    return OPTIMIZERS if cost.op.startswith("_foreach_") else _BY_FAMILY.get(cost.family, MEMORY)


class GpuModel:
    """The times of operators on a target.

    Args:
        target: The device.
        dtype: The dtype of the experiment, which decides whether float32 products are TF32.
    """

    host = HOST_S

    def __init__(self, target: Target, dtype: Dtype) -> None:
        own = MEASURED.get(target)
        name = own or _OF_ARCHITECTURE.get(target.compute_capability)
        self._products: ProductTable | None = read_product_table(name) if name else None
        self._is_own = own is not None
        self._target = target
        self._dtype = dtype
        self.common_spread = _CLOCKS_OF.get(target.compute_capability, _CLOCKS)
        """The spread of all times of the device together."""

        self._bandwidth = target.bandwidth_bytes_per_s
        self._bandwidth *= _BANDWIDTH.get(target.compute_capability, 1.0)

    def predict(self, cost: Cost, moved_bytes: int) -> OpTime:
        """Predict the device's time for one call of an operator.

        ``moved_bytes`` are those that it reads and writes, each once.

        Raises:
            UnknownTimeError: It is a product or attention of a dtype whose peak is not known.
        """
        streamed_s = moved_bytes / self._bandwidth
        if cost.product is not None:
            time = self._predict_product(cost.product, cost.dtype)
            if not cost.is_aligned and self._on_tensor_cores(cost.dtype):
                spread = math.hypot(time.spread, MISALIGNED.spread)
                time = OpTime(time.seconds / MISALIGNED.value, spread, "data sheet")
        elif cost.convolution:
            times = [self._predict_product(shape, cost.dtype) for shape in cost.convolution]
            seconds = sum(time.seconds for time in times) / CONVOLUTIONS.value
            spread = math.hypot(max(time.spread for time in times), CONVOLUTIONS.spread)
            time = OpTime(seconds, spread, "data sheet")
        elif cost.attention is not None:
            time = self._predict_attention(cost, cost.attention, streamed_s)
        elif cost.family in COUNTED:
            is_split = (
                cost.op.startswith("dpprof.") and ceiling_of(cost.dtype, self._dtype) == "tf32"
            )
            share = UNKNOWN_PRODUCTS
            if cost.op == "dpprof.gram_squares" and self._on_tensor_cores(cost.dtype):
                in_16_bits = GRAMS_OF.get(self._target.compute_capability, GRAMS)
                share = GRAMS_IN_TF32 if is_split else in_16_bits
            flops = cost.flops * (TF32_PRODUCTS if is_split else 1)
            bound = max(flops / self._peak(cost.dtype), streamed_s)
            time = OpTime(bound / share.value, share.spread, "data sheet")
        else:
            share = _share_of_bandwidth(cost)
            reached = share.value * (_READ_AGAIN if cost.reads_again else 1.0)
            time = OpTime(streamed_s / reached, share.spread, "data sheet")
        return time._replace(seconds=time.seconds + KERNEL_S)

    def _predict_product(self, shape: ProductShape, dtype: str) -> OpTime:
        bytes_per_s = self._bandwidth
        own_peaks = PeakRates(self._peak(dtype), bytes_per_s)
        bound = float(bound_s(shape, _ITEMSIZES.get(dtype, 4), own_peaks))
        in_16_bits = self._target.peak("float16")
        if self._products is None or in_16_bits is None:
            on_tensor_cores = self._on_tensor_cores(dtype)
            share = UNKNOWN_PRODUCTS.value if on_tensor_cores else self._share_in_float32
            return OpTime(bound / share, UNKNOWN_PRODUCTS.spread, "data sheet")
        peaks = PeakRates(in_16_bits, bytes_per_s)
        time = self._products.predict(shape, _ITEMSIZES["bfloat16"], peaks)
        if not self._is_own:
            time = time._replace(spread=2 * time.spread, basis="extrapolated")
        if _ITEMSIZES.get(dtype) == _ITEMSIZES["bfloat16"]:
            return time
        # What a product takes beyond its bound is latency, which no arithmetic unit shortens.
        beyond = time.seconds - float(bound_s(shape, _ITEMSIZES["bfloat16"], peaks))
        share = _TF32 if self._on_tensor_cores(dtype) else self._share_in_float32
        seconds = bound / share + max(beyond, 0.0)
        return OpTime(seconds, max(time.spread, _OTHER_SPREAD), "data sheet")

    @property
    def _share_in_float32(self) -> float:
        return _FLOAT32.get(self._target.compute_capability, UNKNOWN_PRODUCTS.value)

    def _on_tensor_cores(self, op_dtype: str) -> bool:
        ceiling = ceiling_of(op_dtype, self._dtype)
        return ceiling in ("bfloat16", "float16", "tf32") and not self._target.price_of(ceiling)

    def _predict_attention(self, cost: Cost, sizes: AttentionShape, streamed_s: float) -> OpTime:
        major = self._target.compute_capability.partition(".")[0]
        # In float32 there is neither FlashAttention nor a tensor core, whatever products use.
        in_float32 = self._target.peak("float32")
        if cost.dtype == "float32" and in_float32 is not None:
            peak = in_float32 * self._share_in_float32 / _FLOAT32["9.0"]
            major = "8"
        else:
            peak = self._peak(cost.dtype)
        forward, backward = _FLASH.get(major, _FLASH["8"])
        share = backward if sizes.is_backward else forward
        share *= sizes.keys / (sizes.keys + _HALF_TOKENS[sizes.is_backward])
        share *= 1.0 if sizes.width >= _FULL_WIDTH else _NARROW
        flops = cost.flops / (2 * CAUSAL) if sizes.is_causal else cost.flops
        seconds = max(flops / (peak * share), streamed_s / MEMORY.value)
        spread = _ATTENTION_SPREAD if major in _FLASH else 2 * _ATTENTION_SPREAD
        return OpTime(seconds, spread, "data sheet")

    def _peak(self, op_dtype: str) -> float:
        ceiling = ceiling_of(op_dtype, self._dtype)
        peak = self._target.peak(ceiling)
        if peak is None:
            raise UnknownTimeError(f"the target's flops_per_s has no {ceiling}")
        return peak
