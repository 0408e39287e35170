"""The sections on measurements: time, comparison, code paths and repeatability."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from dpprof.experiments.records.terms import PHASES
from dpprof.results.analysis.selection import spread_phases
from dpprof.results.analysis.statistics import CONFIDENCE, NO_DIFFERENCE, attainable_coverage
from dpprof.results.report.rendering.document import Blocks
from dpprof.results.report.sections import column
from dpprof.results.report.sections.column import Column
from dpprof.results.report.sections.tables import paragraph, tabulate, tabulate_experiments
from dpprof.results.report.wording import ENDS, MIB, MS, percent, ratio_with_interval, reach


def compare(experiments: pd.DataFrame) -> Blocks:
    """Return the comparison of experiments by time and peak."""
    measured = experiments[experiments["processes"] + experiments["peak_processes"] > 0]
    if measured.empty:
        return paragraph("No experiment succeeded, so there is nothing to compare.")
    columns = {
        "step (ms)": column.amount("median_step_s", MS),
        "interval": column.between("step_low_s", "step_high_s", MS),
        "time ratio": Column(
            lambda row: (
                NO_DIFFERENCE if row["step_verdict"] == NO_DIFFERENCE else ratio_with_interval(row)
            )
        ),
        **column.speed(measured),
        "peak (MiB)": column.amount("peak_bytes", MIB),
        "peak ratio": column.amount("peak_ratio", digits=2),
        "n": column.whole("processes"),
    }
    caption = " ".join([*_explain_times(measured), *_explain_peaks(measured)])
    return tabulate_experiments(caption, columns, measured, "experiments.csv", by="median_step_s")


def _explain_times(rows: pd.DataFrame) -> Iterator[str]:
    yield "Step time is the median over the n processes of each process's median."
    yield "Intervals are 95 % bootstrap intervals over processes."
    counts = rows["processes"][rows["processes"] > 1]
    best = attainable_coverage(int(counts.min())) if len(counts) else CONFIDENCE
    if best < CONFIDENCE:
        yield f"An interval from {counts.min()} processes covers {percent(best)} at most."
    yield "Ratios are to standard with all else equal."
    floors = rows["step_floor"].dropna()
    if floors.empty:
        yield "Nothing was replicated, so the noise of time ratios is unknown."
        return
    floor = reach(*(percent(floors.agg(end), 1) for end in ENDS))
    by = ", by model and number of processes," if " to " in floor else ""
    yield (
        "A time ratio counts if it exceeds the noise floor. 95 % of comparisons of equal "
        f"experiments stay within the floor, which is {floor}{by} here."
    )


def _explain_peaks(rows: pd.DataFrame) -> Iterator[str]:
    kinds = set(rows["peak_kind"].dropna())
    if "allocated" in kinds:
        yield "Peak is the allocator's steady-state peak."
        exact = rows[(rows["peak_kind"] == "allocated") & (rows["peak_processes"] > 1)]
        if len(exact) and (exact["peak_min_bytes"] == exact["peak_max_bytes"]).all():
            yield (
                f"It is equal to the byte in all processes of each of the {len(exact)} replicated "
                "experiments."
            )
    if "rss" in kinds:
        where = "Where the allocator's is unknown, peak" if "allocated" in kinds else "Peak"
        yield (
            f"{where} is the process's largest resident memory. It includes Python and the "
            "libraries, which dominate for a small model and grow where Opacus is imported. The "
            "instrument phases measures the allocator's peak."
        )


def by_method(methods: pd.DataFrame) -> Blocks:
    """Return a summary of each method's cost over all settings."""
    compared = methods[methods["step_ratio_count"] + methods["peak_ratio_count"] > 0]
    if compared["experiments"].max() == 1:
        return []  # the comparison already shows it
    columns = {
        "method": column.text("method"),
        "experiments": column.whole("experiments"),
        "time ratio": column.amount("step_ratio_median", digits=2),
        "time, range": column.between("step_ratio_min", "step_ratio_max", digits=2),
        "peak ratio": column.amount("peak_ratio_median", digits=2),
        "peak, range": column.between("peak_ratio_min", "peak_ratio_max", digits=2),
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
        "step (ms)": column.between("step_low_s", "step_high_s", MS),
        "allocated": column.words(_equal_or_span),
        "reserved (MiB)": column.between("reserved_min_bytes", "reserved_max_bytes", MIB),
        "RSS (MiB)": column.between("rss_min_bytes", "rss_max_bytes", MIB),
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


def phases(table: pd.DataFrame, experiments: pd.DataFrame) -> Blocks:
    """Return the time by phase; nothing without runs of the instrument phases."""
    if table.empty:
        return []
    over_processes = spread_phases(table)
    shown = [phase for phase in PHASES if phase in over_processes]
    rows = experiments.merge(over_processes, left_on="experiment_id", right_index=True)
    rows = rows.assign(sum=rows[shown].sum(axis=1))
    columns = {phase.replace("_", " "): column.amount(phase, MS) for phase in (*shown, "sum")}
    caption = (
        "Milliseconds by phase, medians over steps and processes. These processes wait for the "
        "device at the end of each phase, so the sum differs from the step time of clean runs."
    )
    return tabulate_experiments(caption, columns, rows, "phases.csv", by="sum")


def code_paths(samplers: pd.DataFrame) -> Blocks:
    """Return how each type of layer was computed; nothing where no run recorded it."""
    seen = samplers[["method", "layer", "path"]].drop_duplicates()
    seen = seen.sort_values(["method", "layer", "path"])
    columns = {name: column.text(name) for name in ("method", "layer", "path")}
    caption = (
        "The code path that each type of layer took. A norm sampler computes norms without "
        "per-sample gradients, a grad sampler is Opacus's rule for per-sample gradients, and "
        "functorch is the fallback without a rule."
    )
    return tabulate(caption, columns, seen, "samplers.csv")
