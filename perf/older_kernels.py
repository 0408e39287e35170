"""Times of operators as libraries ran them when others measured, where a source says how fast."""

import math

from dpprof.predict.flops.cost import Cost
from dpprof.predict.step_time.gpu_model import GpuModel
from dpprof.predict.step_time.op_time import Z_90, OpTime

_FORWARD, _BACKWARD = 1.4, 2.0
_FEWEST, _MOST = 1.3, 2.5
_SPREAD = math.log(_MOST / _FEWEST) / 2 / Z_90


class TritonAttention(GpuModel):
    """Attention by FlashAttention's Triton kernel of 2023, on an A100 or H100.

    Dao 2023, "FlashAttention-2", section 4.1, on an A100: FlashAttention-2, whose speed current
    libraries have at least, is 1.3 to 1.5 times as fast forward, about 2 times backward, and 1.3 to
    2.5 times over all lengths and widths.
    """

    def predict(self, cost: Cost, moved_bytes: int) -> OpTime:
        """Predict the device's time for one call of an operator."""
        found = super().predict(cost, moved_bytes)
        if cost.attention is None:
            return found
        slower = _BACKWARD if cost.attention.is_backward else _FORWARD
        spread = math.hypot(found.spread, _SPREAD)
        return found._replace(seconds=slower * found.seconds, spread=spread)


KERNELS = {"": GpuModel, "triton-2023": TritonAttention}
"""The times of operators by what a row says of its attention."""
