"""What a section's figures show, in a sentence: fits, memory, kernels, growth, and a budget."""

import pandas as pd

from dpprof.analysis.selection import find_fitting, group_by
from dpprof.analysis.tables.axes import BASELINE, SETTING, WITHOUT_BATCH
from dpprof.analysis.tables.frames import least_of
from dpprof.records.terms import COMPONENTS
from dpprof.report.rendering.document import Bullets
from dpprof.report.wording import (
    THIS_MACHINE,
    listed,
    name_setting,
    number,
    percent,
    significant,
    span_of_ratios,
    times,
)


def tell_memory(composition: pd.DataFrame) -> list[Bullets]:
    """Return the main owner of the largest setting's highest peak; nothing without records."""
    here = composition[composition["target"].isna()]
    return [Bullets(items=(_highest_peak(here),))] if len(here) else []


def tell_fits(composition: pd.DataFrame) -> list[Bullets]:
    """Return which methods fit on each target, by the predicted peaks; nothing without targets."""
    targets = composition.dropna(subset=["target_memory_bytes"]).groupby("target")
    fits = tuple(_fitting(str(target), rows) for target, rows in targets)
    return [Bullets(items=fits)] if fits else []


def _highest_peak(rows: pd.DataFrame) -> str:
    sizes = rows[["parameters_total", "batch_size", "seq_len"]].astype(float).prod(axis=1)
    largest = rows[sizes == sizes.max()]
    row = largest.loc[largest["peak_bytes"].idxmax()]
    owner = max(COMPONENTS, key=lambda name: row[name])
    return (
        f"In {name_setting(row)}, {row['method']} has the highest peak, "
        f"{number(row['peak_bytes'], 2**20)} MiB in the phase {_plain(row['phase'])}; "
        f"{row[owner] / row['peak_bytes']:.0%} of it is {_plain(owner)}."
    )


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _fitting(target: str, rows: pd.DataFrame) -> str:
    """Return which methods fit on a target in every setting, in some and in none."""
    fits = find_fitting(rows)
    share = fits.groupby(rows["method"]).mean()
    groups = {
        "in every setting": share.index[share == 1],
        "in some settings": share.index[(share > 0) & (share < 1)],
        "in no setting": share.index[share == 0],
    }
    said = [f"{where} {listed(names)}" for where, names in groups.items() if len(names)]
    return f"Predicted to fit on {target}: {'; '.join(said)}."


def tell_kernels(kernels: pd.DataFrame, traces: pd.DataFrame) -> list[Bullets]:
    """Return which op kind takes most of a traced step, by method; nothing without traces."""
    if traces.empty or kernels.empty:
        return []
    first = _find_largest(traces)
    told = []
    for _, trace in first.iterrows():
        same = kernels[kernels["experiment_id"] == trace["experiment_id"]]
        seconds = same[same["replicate"] == trace["replicate"]].groupby("op_kind")["seconds"].sum()
        if len(seconds):
            most = str(seconds.idxmax())
            told.append((most, str(trace["method"]), seconds[most] / trace["step_s"]))
    if not told:
        return []
    rows = pd.DataFrame(told, columns=pd.Index(["op_kind", "method", "share"]))
    said = []
    for op_kind, alike in rows.groupby("op_kind", sort=False):
        said.append(f"{op_kind} with {listed(alike['method'])} ({_span(alike['share'])})")
    idle = (first["idle_s"] / first["step_s"]).astype(float)
    waits = f"; nothing runs in {_span(idle)} of it"
    where = name_setting(first.iloc[0])
    sentence = f"In a traced step of {where}, most time goes to {', '.join(said)}"
    return [Bullets(items=(f"{sentence}{waits if idle.notna().all() else ''}.",))]


def _span(shares: "pd.Series[float]") -> str:
    low, high = percent(shares.min()), percent(shares.max())
    return low if low == high else f"{low} to {high}"


def _find_largest(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per method of the setting with most methods, else with most parameters."""
    settings = [one for _, one in group_by(SETTING, rows)]
    chosen = max(settings, key=lambda one: (one["method"].nunique(), one["parameters_total"].max()))
    return chosen.drop_duplicates("method")


_FEW = 3
_ALONG = {"seq_len": "T", "batch_size": "B"}


def tell_growth(experiments: pd.DataFrame) -> list[Bullets]:
    """Return how much longer a step takes with more tokens; nothing where sizes do not vary."""
    said = [
        sentence
        for along, other in (("seq_len", "batch_size"), ("batch_size", "seq_len"))
        if (sentence := _tell_axis(experiments, along, other))
    ]
    return [Bullets(items=tuple(said))] if said else []


def _tell_axis(experiments: pd.DataFrame, along: str, other: str) -> str | None:
    timed = experiments[experiments["target"].isna()].dropna(subset=["median_step_s"])
    best: tuple[int, pd.DataFrame] | None = None
    for _, rows in group_by([name for name in SETTING if name != along], timed):
        low, high = rows[along].min(), rows[along].max()
        ends = rows[rows[along].isin([low, high])].drop_duplicates(["method", along])
        both = ends[ends.groupby("method")[along].transform("nunique") == 2]  # noqa: PLR2004 (ends)
        if len(both) and (best is None or len(both) > best[0]):
            best = len(both), both
    if best is None:
        return None
    rows = best[1]
    low, high = rows[along].min(), rows[along].max()
    steps = rows.pivot_table(index="method", columns=along, values="median_step_s")
    growth = (steps[high] / steps[low]).astype(float)
    first = rows.iloc[0]
    sizes = f"{_ALONG[along]} = {low:,} to {high:,}"
    what = f"{first['model']} at {_ALONG[other]} = {first[other]:,}"
    told = [f"{times(growth[BASELINE])} with standard"] if BASELINE in growth else []
    private = growth.drop(BASELINE, errors="ignore")
    if len(private):
        named = listed(private.index) if len(private) <= _FEW else f"{len(private)} private methods"
        told.append(f"{span_of_ratios(private)} with {named}")
    factor = high / low
    return f"From {sizes}, {factor:.3g} times the tokens, a step of {what} takes {listed(told)}."


def tell_price(budget: pd.DataFrame) -> list[Bullets]:
    """Return what the privacy budget costs with the cheapest private method; else nothing.

    It speaks of the setting with the largest model, and of methods that are known at every epsilon.
    """
    known = budget.dropna(subset=["gpu_hours", "epsilon", "parameters_total"])
    if known.empty:
        return []
    first = least_of(known, "parameters_total", -1)
    same = next(rows for _, rows in group_by(WITHOUT_BATCH, known) if first.name in rows.index)
    counts = same.groupby("method")["epsilon"].nunique()
    whole = same[same["method"].map(counts) == counts.max()]
    method = str(whole.groupby("method")["gpu_hours"].sum().astype(float).idxmin())
    rows = same[same["method"] == method].sort_values("epsilon", ascending=False)
    hours = [f"{significant(row['gpu_hours'])} at {row['epsilon']:g}" for _, row in rows.iterrows()]
    place = THIS_MACHINE if pd.isna(first["target"]) else first["target"]
    said = (
        f"GPU hours of the whole training of {first['model']} on {place} with {method}, by "
        f"epsilon: {listed(hours)}; predicted."
    )
    return [Bullets(items=(said,))]
