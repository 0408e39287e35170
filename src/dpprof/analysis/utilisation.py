"""How much of a device a step uses: FLOPs over time, against what the device does at most.

MFU counts the FLOPs that the non-private step needs (Chowdhery et al. 2022, "PaLM", appendix B),
HFU those that were executed. Both are against the dense peak of the dtype in use: a GPU's data
sheet, and on a CPU, which has none, the fastest product that was measured on it. Nothing is
rounded down to 1: a value above it says that a FLOP or the peak is wrong.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dpprof.records.ceilings import Ceilings, find_ceilings
from dpprof.records.result import Compute
from dpprof.spec.target import Dtype

NOT_TIMED = "no clean run told how long a step takes there"


class Peak(NamedTuple):
    """The dense FLOP/s that utilisation is against."""

    flops_per_s: float | None
    source: str | None
    reason: str | None
    """Why there is none."""


def find_peak(
    compute: Compute, dtype: Dtype, device: Mapping[str, Any] | None, known: Iterable[Ceilings]
) -> Peak:
    """Find the peak of the dtype in use.

    Args:
        compute: With the data sheet's peak, where the timeline is of a device that has one.
        dtype: Of the experiment.
        device: Where the step was timed, as its result describes it; None where it was not.
        known: The ceilings that were measured.
    """
    if compute.peak_flops_per_s is not None:
        return Peak(compute.peak_flops_per_s, compute.peak_source, None)
    if device is None:
        return Peak(None, None, NOT_TIMED)
    name = device.get("name")
    if device.get("type") != "cpu":
        return Peak(None, None, f"no data sheet is known of {name}")
    ceilings = find_ceilings(known, device)
    if ceilings is None:
        return Peak(None, None, f"nobody measured what {name} does at most")
    measured = ceilings.matmul.get(dtype)
    if measured is None:
        reason = ceilings.reasons.get(f"matmul.{dtype}", "it was not measured")
        return Peak(None, None, f"no product of {dtype} is known of {name}: {reason}")
    source = f"the fastest {dtype} product measured on {name}, n = {measured.size}"
    return Peak(measured.flops_per_s, source, None)


def utilise(flops: float | None, step_s: float | None, peak: float | None) -> float | None:
    """Return the share of the peak that FLOPs in a step amount to; None where one is unknown."""
    if flops is None or not step_s or not peak:
        return None
    return flops / step_s / peak
