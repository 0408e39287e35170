"""The sections on measurements: time, comparison, code paths and repeatability."""

from typing import Any

import pandas as pd

from dpprof.analysis.statistics import CONFIDENCE, NO_DIFFERENCE, attainable_coverage
from dpprof.records.terms import PHASES
from dpprof.report.rendering.document import Paragraph
from dpprof.report.sections.tables import (
    ORDER,
    Cell,
    Told,
    amount,
    column,
    name_experiments,
    tabulate,
    texts,
)
from dpprof.report.wording import number, span

_MIB = 2**20
_MS = 1e-3


def compare(experiments: pd.DataFrame) -> Told:
    """Return the comparison of experiments by time and peak."""
    known = experiments[experiments["processes"] + experiments["peak_processes"] > 0]
    if known.empty:
        return [Paragraph(text="No experiment succeeded, so there is nothing to compare.")]
    ordered = known.sort_values([*ORDER, "median_step_s"])
    naming = name_experiments(ordered)
    columns: dict[str, Cell] = naming | {
        "step (ms)": lambda row: number(row["median_step_s"], _MS),
        "interval": lambda row: span(row["step_low_s"], row["step_high_s"], _MS),
        "time ratio": _time_ratio,
        "tokens/s": lambda row: number(row["tokens_per_s"], digits=0),
        "peak (MiB)": lambda row: number(row["peak_bytes"], _MIB),
        "peak ratio": lambda row: number(row["peak_ratio"], digits=2),
        "n": column("processes"),
    }
    source = "results/tables/experiments.csv"
    return [tabulate(_explain(ordered), columns, ordered, texts(naming), source)]


def _time_ratio(row: Any) -> str:
    if row["step_verdict"] == NO_DIFFERENCE:
        return NO_DIFFERENCE
    ratio = number(row["step_ratio"], digits=2)
    interval = span(row["step_ratio_low"], row["step_ratio_high"], digits=2)
    return ratio if interval == "-" else f"{ratio} ({interval})"


def _explain(rows: pd.DataFrame) -> str:
    """Return the caption of the comparison: what the numbers mean and how certain they are."""
    said = ["Step time is the median over the n processes of each process's median."]
    said.append("Intervals are 95 % bootstrap intervals over processes.")
    counts = rows["processes"][rows["processes"] > 1]
    if len(counts):
        best = attainable_coverage(int(counts.min()))
        if best < CONFIDENCE:
            said.append(f"An interval from {counts.min()} processes covers {best:.0%} at most.")
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
    low, high = f"{floors.min():.1%}", f"{floors.max():.1%}"
    return low if low == high else f"{low} to {high}, by model and number of processes,"


def by_method(methods: pd.DataFrame) -> Told:
    """Return a summary of each method's cost over all settings."""
    known = methods[methods["step_ratio_count"] + methods["peak_ratio_count"] > 0]
    if known.empty or known["experiments"].max() == 1:
        return []  # the comparison already shows it
    columns: dict[str, Cell] = {
        "method": column("method"),
        "experiments": column("experiments"),
        "time ratio": lambda row: number(row["step_ratio_median"], digits=2),
        "time, range": lambda row: span(row["step_ratio_min"], row["step_ratio_max"], digits=2),
        "peak ratio": lambda row: number(row["peak_ratio_median"], digits=2),
        "peak, range": lambda row: span(row["peak_ratio_min"], row["peak_ratio_max"], digits=2),
    }
    caption = (
        "Ratios to standard over all settings: the median and the range. The comparison of "
        "experiments shows whether a single ratio exceeds the noise."
    )
    return [tabulate(caption, columns, known, ("method",), "results/tables/methods.csv")]


def repeat(experiments: pd.DataFrame) -> Told:
    """Return how well figures repeat between processes; nothing without replicates."""
    most = experiments[["processes", "peak_processes"]].max(axis=1)
    rows = experiments[most > 1].sort_values([*ORDER, "method"])
    if rows.empty:
        return []
    naming = name_experiments(rows)
    columns = naming | {
        "step (ms)": lambda row: span(row["step_low_s"], row["step_high_s"], _MS),
        "allocated": _equal_or_span,
        "reserved (MiB)": lambda row: _range(row, "reserved"),
        "RSS (MiB)": lambda row: _range(row, "rss"),
    }
    caption = (
        "The range over the processes of an experiment; for the step its interval. Allocated bytes "
        "must be equal in all processes; reserved and resident bytes may differ."
    )
    text = (*texts(naming), "step (ms)", "allocated", "reserved (MiB)", "RSS (MiB)")
    return [tabulate(caption, columns, rows, text, "results/tables/experiments.csv")]


def _equal_or_span(row: Any) -> str:
    if row["peak_kind"] != "allocated" or row["peak_processes"] == 1:
        return "-"
    if row["peak_min_bytes"] == row["peak_max_bytes"]:
        return f"equal in {row['peak_processes']}"
    return f"{row['peak_min_bytes']:,.0f} to {row['peak_max_bytes']:,.0f} bytes"


def _range(row: Any, kind: str) -> str:
    return span(row[f"{kind}_min_bytes"], row[f"{kind}_max_bytes"], _MIB)


def phases(table: pd.DataFrame, experiments: pd.DataFrame) -> Told:
    """Return the time by phase; nothing without runs of the instrument phases."""
    if table.empty:
        return []
    medians = table.groupby(["experiment_id", "phase"])["median_s"].median()
    over_processes = medians.unstack()  # noqa: PD010 (there is nothing to aggregate)
    shown = [phase for phase in PHASES if phase in over_processes]
    rows = experiments.merge(over_processes, left_on="experiment_id", right_index=True)
    rows = rows.assign(sum=rows[shown].sum(axis=1)).sort_values([*ORDER, "sum"])
    naming = name_experiments(rows)
    columns = naming | {phase.replace("_", " "): amount(phase, _MS) for phase in (*shown, "sum")}
    caption = (
        "Milliseconds by phase, medians over steps and processes. These processes wait for the "
        "device at the end of each phase, so the sum differs from the step time of clean runs."
    )
    return [tabulate(caption, columns, rows, texts(naming), "results/tables/phases.csv")]


def code_paths(samplers: pd.DataFrame) -> Told:
    """Return how each type of layer was computed; nothing where no run recorded it."""
    if samplers.empty:
        return []
    seen = samplers[["method", "layer", "path"]].drop_duplicates()
    seen = seen.sort_values(["method", "layer", "path"])
    columns: dict[str, Cell] = {name: column(name) for name in ("method", "layer", "path")}
    caption = (
        "The code path that each type of layer took. A norm sampler computes norms without "
        "per-sample gradients, a grad sampler is Opacus's rule for per-sample gradients, and "
        "functorch is the fallback without a rule."
    )
    return [tabulate(caption, columns, seen, tuple(columns), "results/tables/samplers.csv")]
