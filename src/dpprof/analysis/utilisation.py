"""How much of a device a step uses: its FLOP/s as a share of the device's peak.

MFU counts the FLOPs that the non-private step needs (Chowdhery et al. 2022, "PaLM", appendix B).
HFU counts the executed FLOPs. Both are shares of the dense peak of the dtype in use. A GPU's peak
is from its data sheet. A CPU has none, so its peak is the fastest matrix product measured on it.
Values above 1 stay as they are: they show that the FLOPs, the time or the peak is wrong.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dpprof.records.ceilings import Ceilings, find_ceilings
from dpprof.records.step_costs import Compute
from dpprof.spec.target import Dtype

NOT_TIMED = "no clean run measured the step time there"


class Peak(NamedTuple):
    """The dense FLOP/s that utilisation is a share of."""

    flops_per_s: float | None
    source: str | None
    reason: str | None
    """Why there is no peak."""


def find_peak(
    compute: Compute, dtype: Dtype, device: Mapping[str, Any] | None, known: Iterable[Ceilings]
) -> Peak:
    """Return the peak of the dtype in use.

    ``device`` is where the step was timed, as its result describes it; None if it was not.
    """
    if compute.peak_flops_per_s is not None:
        return Peak(compute.peak_flops_per_s, compute.peak_source, None)
    if device is None:
        return Peak(None, None, NOT_TIMED)
    name = device.get("name")
    if device.get("type") != "cpu":
        return Peak(None, None, f"dpprof has no data sheet of {name}")
    ceilings = find_ceilings(known, device)
    if ceilings is None:
        return Peak(None, None, f"the ceilings of {name} were not measured")
    measured = ceilings.matmul.get(dtype)
    if measured is None:
        reason = ceilings.reasons.get(f"matmul.{dtype}", "it was not measured")
        return Peak(None, None, f"no {dtype} matrix product was measured on {name}: {reason}")
    source = f"the fastest {dtype} matrix product measured on {name}, n = {measured.size}"
    return Peak(measured.flops_per_s, source, None)


def utilise(flops: float | None, step_s: float | None, peak: float | None) -> float | None:
    """Return the FLOP/s of a step as a share of the peak; None where an argument is unknown."""
    if flops is None or not step_s or not peak:
        return None
    return flops / step_s / peak
