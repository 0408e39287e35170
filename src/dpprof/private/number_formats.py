"""The number formats of 16 bits, and the scale of losses that float16 needs."""

import math

SHORT = ("bfloat16", "float16")
"""Dtypes of 16 bits: bfloat16 has float32's range and 8 bits of precision, float16 has 11 bits, and
no number between 65,504 and infinity or between 0 and 6e-8."""

KEPT_LOGITS = (
    "logits are kept through backward and the optimizer's step, as out = model(...) does; "
    "loss = model(...).loss frees them"
)


def refuse_loss_scale(scale: float) -> float:
    """Return a scale of losses that rounds nothing: a power of two, up to 2^32 (``ValueError``)."""
    is_in_range = math.isfinite(scale) and 1 <= scale <= 2**32
    if not is_in_range or math.frexp(scale)[0] != 0.5:  # noqa: PLR2004 (of every power of two)
        raise ValueError(
            f"loss_scale must be a power of two from 1 to 2^32, so that it rounds nothing, and is "
            f"{scale:g}; 65536 is usual"
        )
    return float(scale)
