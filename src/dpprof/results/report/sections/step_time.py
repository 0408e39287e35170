"""The sections on measurements: time, comparison, code paths and repeatability."""

from typing import Any

import pandas as pd

from dpprof.experiments.records.terms import PHASES
from dpprof.results.analysis.selection import spread_phases
from dpprof.results.analysis.statistics import CONFIDENCE, NO_DIFFERENCE, attainable_coverage
from dpprof.results.report.rendering.document import Blocks, Paragraph
from dpprof.results.report.sections.tables import (
    Column,
    amount,
    between,
    speed,
    tabulate,
    tabulate_experiments,
    text,
    whole,
    words,
)
from dpprof.results.report.wording import ENDS, percent, ratio_with_interval, reach

_MIB = 2**20
_MS = 1e-3


def compare(experiments: pd.DataFrame) -> Blocks:
    """Return the comparison of experiments by time and peak."""
    measured = experiments[experiments["processes"] + experiments["peak_processes"] > 0]
    if measured.empty:
        return [Paragraph(text="No experiment succeeded, so there is nothing to compare.")]
    columns = {
        "step (ms)": amount("median_step_s", _MS),
        "interval": between("step_low_s", "step_high_s", _MS),
        "time ratio": Column(_time_ratio),
        **speed(measured),
        "peak (MiB)": amount("peak_bytes", _MIB),
        "peak ratio": amount("peak_ratio", digits=2),
        "n": whole("processes"),
    }
    caption = _explain(measured)
    return tabulate_experiments(caption, columns, measured, "experiments.csv", by=["median_step_s"])


def _time_ratio(row: Any) -> str:
    return NO_DIFFERENCE if row["step_verdict"] == NO_DIFFERENCE else ratio_with_interval(row)


def _explain(rows: pd.DataFrame) -> str:
    """Return the caption of the comparison: what the numbers mean and how certain they are."""
    said = ["Step time is the median over the n processes of each process's median."]
    said.append("Intervals are 95 % bootstrap intervals over processes.")
    counts = rows["processes"][rows["processes"] > 1]
    if len(counts):
        best = attainable_coverage(int(counts.min()))
        if best < CONFIDENCE:
            said.append(
                f"An interval from {counts.min()} processes covers {percent(best)} at most."
            )
    said.append("Ratios are to standard with all else equal.")
    floors = rows["step_floor"].dropna()
    if len(floors):
        said.append(
            "A time ratio counts if it exceeds the noise floor. 95 % of comparisons of equal "
            f"experiments stay within the floor, which is {_percent(floors)} here."
        )
    else:
        said.append("Nothing was replicated, so the noise of time ratios is unknown.")
    kinds = set(rows["peak_kind"].dropna())
    if "allocated" in kinds:
        said.append("Peak is the allocator's steady-state peak.")
        exact = rows[(rows["peak_kind"] == "allocated") & (rows["peak_processes"] > 1)]
        if len(exact) and (exact["peak_min_bytes"] == exact["peak_max_bytes"]).all():
            said.append(
                f"It is equal to the byte in all processes of each of the {len(exact)} replicated "
                "experiments."
            )
    if "rss" in kinds:
        where = "Where the allocator's is unknown, peak" if "allocated" in kinds else "Peak"
        said.append(
            f"{where} is the process's largest resident memory. It includes Python and the "
            "libraries, which dominate for a small model and grow where Opacus is imported. The "
            "instrument phases measures the allocator's peak."
        )
    return " ".join(said)


def _percent(floors: "pd.Series[float]") -> str:
    said = reach(*(percent(floors.agg(end), 1) for end in ENDS))
    return f"{said}, by model and number of processes," if " to " in said else said


def by_method(methods: pd.DataFrame) -> Blocks:
    """Return a summary of each method's cost over all settings."""
    compared = methods[methods["step_ratio_count"] + methods["peak_ratio_count"] > 0]
    if compared["experiments"].max() == 1:
        return []  # the comparison already shows it
    columns = {
        "method": text("method"),
        "experiments": whole("experiments"),
        "time ratio": amount("step_ratio_median", digits=2),
        "time, range": between("step_ratio_min", "step_ratio_max", digits=2),
        "peak ratio": amount("peak_ratio_median", digits=2),
        "peak, range": between("peak_ratio_min", "peak_ratio_max", digits=2),
    }
    caption = (
        "Ratios to standard over all settings: the median and the range. The comparison of "
        "experiments shows whether a single ratio exceeds the noise."
    )
    return tabulate(caption, columns, compared, "methods.csv")


def repeat(experiments: pd.DataFrame) -> Blocks:
    """Return how well figures repeat between processes; nothing without replicates."""
    most = experiments[["processes", "peak_processes"]].max(axis=1)
    columns = {
        "step (ms)": between("step_low_s", "step_high_s", _MS),
        "allocated": words(_equal_or_span),
        "reserved (MiB)": _range("reserved"),
        "RSS (MiB)": _range("rss"),
    }
    caption = (
        "The range over the processes of an experiment; for the step its interval. Allocated bytes "
        "must be equal in all processes; reserved and resident bytes may differ."
    )
    return tabulate_experiments(caption, columns, experiments[most > 1], "experiments.csv")


def _equal_or_span(row: Any) -> str:
    if row["peak_kind"] != "allocated" or row["peak_processes"] == 1:
        return "-"
    if row["peak_min_bytes"] == row["peak_max_bytes"]:
        return f"equal in {row['peak_processes']}"
    return f"{row['peak_min_bytes']:,.0f} to {row['peak_max_bytes']:,.0f} bytes"


def _range(kind: str) -> Column:
    return between(f"{kind}_min_bytes", f"{kind}_max_bytes", _MIB)


def phases(table: pd.DataFrame, experiments: pd.DataFrame) -> Blocks:
    """Return the time by phase; nothing without runs of the instrument phases."""
    if table.empty:
        return []
    over_processes = spread_phases(table)
    shown = [phase for phase in PHASES if phase in over_processes]
    rows = experiments.merge(over_processes, left_on="experiment_id", right_index=True)
    rows = rows.assign(sum=rows[shown].sum(axis=1))
    columns = {phase.replace("_", " "): amount(phase, _MS) for phase in (*shown, "sum")}
    caption = (
        "Milliseconds by phase, medians over steps and processes. These processes wait for the "
        "device at the end of each phase, so the sum differs from the step time of clean runs."
    )
    return tabulate_experiments(caption, columns, rows, "phases.csv", by=["sum"])


def code_paths(samplers: pd.DataFrame) -> Blocks:
    """Return how each type of layer was computed; nothing where no run recorded it."""
    seen = samplers[["method", "layer", "path"]].drop_duplicates()
    seen = seen.sort_values(["method", "layer", "path"])
    columns = {name: text(name) for name in ("method", "layer", "path")}
    caption = (
        "The code path that each type of layer took. A norm sampler computes norms without "
        "per-sample gradients, a grad sampler is Opacus's rule for per-sample gradients, and "
        "functorch is the fallback without a rule."
    )
    return tabulate(caption, columns, seen, "samplers.csv")
