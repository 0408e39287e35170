"""How long operators take on a GPU that need not be here.

Matrix products take measured speeds, where a table of the device or of its architecture exists.
All else rests on the data sheet: a kernel reaches the share of a peak that kernels of its kind are
known to reach. What these shares are, where they come from and how far off they may be is stated
beside each.
"""

from typing import NamedTuple

from dpprof.flops.cost import COUNTED, AttentionShape, Cost, ProductShape
from dpprof.spec import datasheets
from dpprof.spec.target import Dtype, Target, ceiling_of
from dpprof.step_time.op_time import OpTime
from dpprof.step_time.product_table import Peaks, ProductTable, bound_s, read_table

_MEASURED = {
    datasheets.H100: "h100",
    datasheets.H200: "h200",
    datasheets.A100: "a100",
    datasheets.B200: "b200",
    datasheets.L40S: "l40s",
}
"""Devices with a table of their own."""

_OF_ARCHITECTURE = {"8.0": "a100", "8.9": "l40s", "9.0": "h100", "10.0": "b200"}
"""By compute capability, the table whose shares other devices take."""

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


class Share(NamedTuple):
    """The share of a peak that kernels reach, and the spread of its logarithm."""

    share: float
    spread: float


MEMORY = Share(0.88, 0.1)
"""Of bandwidth, by elementwise operators and copies. On an H100 they reach 0.82 to 0.90 from 2^24
elements on (perf/measured_steps.md, which has all figures that are measured here)."""

WIDENING = Share(0.58, 0.1)
"""By copies of bfloat16 to float32: measured, 0.57 to 0.59."""

REDUCTIONS = Share(0.62, 0.2)
"""By softmax, normalisation, sums and their backward passes: measured, 0.39 to 0.70."""

OPTIMIZERS = Share(0.78, 0.1)
"""By operators on all parameters at once: measured, 0.69 to 0.84."""

INDEXING = Share(0.3, 0.5)
"""By lookups, gathers and scatters: measured, 0.23 to 0.36 where they scatter, more where not."""

RANDOM = Share(0.3, 0.4)
"""Of bandwidth, by normal random numbers: their arithmetic binds them, not memory."""

OTHER_PRODUCTS = Share(1.0, 0.2)
"""Of the speed of bfloat16 products of the same shape, each over its own peak, by other dtypes. An
H100's fastest products of float32, TF32 and bfloat16 are each at 0.80 or 0.81 of the data sheet's
peak: measured by ``dpprof ceilings``."""

UNKNOWN_PRODUCTS = Share(0.6, 0.35)
"""Of the roofline, by products of a device without a table of its architecture, and by kernels of
other products, such as those of tiled norms."""

KERNEL_S = 3e-6
"""What a kernel takes besides its work: ``mem_empirical_constant_latency`` of the same source."""

HOST_S = Share(33e-6, 0.3)
"""Seconds of the host for an operator: Python, hooks, autograd, dispatch and launch. Seven steps
that waited for their host took 26 to 48 microseconds an operator, on one machine with an H100."""

_FLASH: dict[str, tuple[float, float]] = {"8": (0.62, 0.5), "9": (0.38, 0.34), "10": (0.3, 0.25)}
"""Shares of the peak by fused attention over long sequences, forward and backward, by the major
compute capability. Dao 2023, "FlashAttention-2": 50 to 73 % forward and up to 63 % backward on an
A100, and 335 TFLOP/s of both on an H100, whose kernels PyTorch runs."""

_ATTENTION_SPREAD = 0.2
_HALF_TOKENS = 256
"""With as many tokens, attention reaches half of its speed over long sequences."""

_FULL_WIDTH = 128
_NARROW = 0.85
"""Heads of half the width reach this share of the speed."""

CLOCKS = 0.05
"""Spread of all times of a device together: clocks, cooling and drivers differ."""


class NoPeakError(LookupError):
    """The target does not say how fast it multiplies matrices of a dtype."""

    def __init__(self, dtype: Dtype) -> None:
        super().__init__(f"the target's flops_per_s has no {dtype}")


_BY_FAMILY: dict[str, Share] = {
    "random": RANDOM,
    "reduction": REDUCTIONS,
    "optimizer": OPTIMIZERS,
    "indexing": INDEXING,
}


def _share_of_bandwidth(cost: Cost) -> Share:
    if cost.op == "_to_copy" and cost.dtype == "bfloat16":
        return WIDENING
    return OPTIMIZERS if cost.op.startswith("_foreach_") else _BY_FAMILY.get(cost.family, MEMORY)


class GpuModel:
    """The times of operators on a target.

    Args:
        target: The device.
        dtype: The dtype of the experiment, which says whether float32 products are TF32.
    """

    host = HOST_S

    def __init__(self, target: Target, dtype: Dtype) -> None:
        own = _MEASURED.get(target)
        name = own or _OF_ARCHITECTURE.get(target.compute_capability)
        self._products: ProductTable | None = read_table(name) if name else None
        self._is_own = own is not None
        self._target = target
        self._dtype = dtype

    def predict(self, cost: Cost, moved_bytes: int) -> OpTime:
        """Predict the device's time for one call of an operator.

        Args:
            cost: What it computes.
            moved_bytes: What it reads and writes, each once.

        Raises:
            NoPeakError: It is a product or attention of a dtype whose peak is not known.
        """
        streamed_s = moved_bytes / self._target.bandwidth_bytes_per_s
        if cost.product is not None:
            found = self._predict_product(cost.product, cost.dtype)
        elif cost.attention is not None:
            found = self._predict_attention(cost, cost.attention, streamed_s)
        elif cost.family in COUNTED:
            share = UNKNOWN_PRODUCTS
            bound = max(cost.flops / self._peak(cost.dtype), streamed_s)
            found = OpTime(bound / share.share, share.spread, "data sheet")
        else:
            share = _share_of_bandwidth(cost)
            found = OpTime(streamed_s / share.share, share.spread, "data sheet")
        return found._replace(seconds=found.seconds + KERNEL_S)

    def _predict_product(self, shape: ProductShape, dtype: str) -> OpTime:
        itemsize = _ITEMSIZES.get(dtype, 4)
        peaks = Peaks(self._peak(dtype), self._target.bandwidth_bytes_per_s)
        if self._products is None:
            seconds = float(bound_s(shape, itemsize, peaks)) / UNKNOWN_PRODUCTS.share
            return OpTime(seconds, UNKNOWN_PRODUCTS.spread, "data sheet")
        found = self._products.predict(shape, itemsize, peaks)
        if not self._is_own:
            found = found._replace(spread=2 * found.spread, basis="extrapolated")
        if itemsize == _ITEMSIZES["bfloat16"]:
            return found
        share, spread = OTHER_PRODUCTS
        return OpTime(found.seconds / share, max(found.spread, spread), "data sheet")

    def _predict_attention(self, cost: Cost, sizes: AttentionShape, streamed_s: float) -> OpTime:
        major = self._target.compute_capability.partition(".")[0]
        forward, backward = _FLASH.get(major, _FLASH["8"])
        share = backward if sizes.is_backward else forward
        share *= sizes.keys / (sizes.keys + _HALF_TOKENS)
        share *= 1.0 if sizes.width >= _FULL_WIDTH else _NARROW
        flops = cost.flops / 2 if sizes.is_causal else cost.flops
        seconds = max(flops / (self._peak(cost.dtype) * share), streamed_s / MEMORY.share)
        return OpTime(seconds, _ATTENTION_SPREAD, "data sheet")

    def _peak(self, op_dtype: str) -> float:
        ceiling = ceiling_of(op_dtype, self._dtype)
        found = self._target.flops_per_s.get(ceiling)
        if found is None:
            raise NoPeakError(ceiling)
        return found
