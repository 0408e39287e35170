"""The table ``methods``: the cost of each method relative to standard, over all settings."""

from typing import Any

import pandas as pd

from dpprof.analysis.frames import make_frame

_RATIOS = ("step_ratio", "peak_ratio")


def tabulate_methods(experiments: pd.DataFrame) -> pd.DataFrame:
    """Return one row per method: how many ratios are known, their median, smallest and largest.

    Ratios of resident memory count only if no experiment has an allocator's peak. A method counts
    as verified if it is in every experiment, and as failed if it failed in one.
    """
    allocated = experiments["peak_kind"] == "allocated"
    if allocated.any():
        peaks = experiments["peak_ratio"].where(allocated)
        experiments = experiments.assign(peak_ratio=peaks)
    rows = []
    for method, group in experiments.groupby("method"):
        row: dict[str, Any] = {"method": method, "experiments": len(group)}
        for ratio in _RATIOS:
            known = group[ratio].astype(float).dropna()
            found = {"median": known.median(), "min": known.min(), "max": known.max()}
            row |= {f"{ratio}_count": len(known)}
            row |= {f"{ratio}_{name}": value for name, value in found.items()}
        row["mechanism"] = next(iter(group["mechanism"].dropna()), None)
        row["verified"] = _all_verified(group["verified"])
        row["max_relative_error"] = group["max_relative_error"].astype(float).max()
        rows.append(row)
    return make_frame("methods", rows)


def _all_verified(verified: "pd.Series[bool]") -> bool | None:
    if verified.eq(False).any():
        return False
    return True if verified.eq(True).all() else None
