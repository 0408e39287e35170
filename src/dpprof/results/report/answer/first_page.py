"""The first page behind the answer: a table with a row a method, a figure, and how far to trust."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from dpprof.experiments.config.registry import PREDICTIONS
from dpprof.results.analysis import selection
from dpprof.results.analysis.collection import NO_RESULT
from dpprof.results.analysis.tables.axes import name_size, name_speed
from dpprof.results.analysis.tables.frames import varying_axes
from dpprof.results.figures.agreement import say_agreement
from dpprof.results.report import wording
from dpprof.results.report.rendering.document import Blocks, Drawing, Section
from dpprof.results.report.sections import column
from dpprof.results.report.sections.column import Column
from dpprof.results.report.sections.outcomes import MEANINGS, count_verified
from dpprof.results.report.sections.tables import list_items, tabulate
from dpprof.system.words import listed, plural

TRUST = "Can I believe this?"

_MOST_ROWS = 24  # more leave no room for the figure; the appendix has all

_SAID = {
    *("model", "lora", "quantization", "trainable", "seq_len", "image_size", "dtype"),
    *("target", "device", "parallel", "method"),
}
"""The axes that the columns of every training say."""

_SPEED = Column(lambda row: wording.rounded(row["tokens_per_s"]))
_METHOD = column.words(lambda row: row["method"])
_VERDICTS: Mapping[Any, str] = {True: "yes", False: "failed"}
_VERIFIED = column.words(lambda row: _VERDICTS.get(row["verified"], "not known"))

_PICTURES = ("budget", "tradeoff", "predicted", "breakdown", "outcomes")
"""The figures that may stand on the first page, the most telling first."""

_PEAKS = {"allocated": "allocator's ", "rss": "resident "}


def build_first_section(tables: selection.Tables, drawings: Sequence[Drawing]) -> Section:
    """Return the table of methods and the figure of the first page; either may be missing.

    The figure is the one that says most; those in which there is nothing to compare are left to
    other sections.
    """
    blocks = _tell_trainings(tables) or _tell_here(tables) or _tell_predicted(tables)
    drawn = {drawing.name: drawing.picture for drawing in drawings if drawing.missing is None}
    if (tables["runs"]["outcome"] == "ok").all():
        drawn.pop("outcomes", None)
    blocks += [drawn[name] for name in _PICTURES if name in drawn][:1]
    return Section(title="The methods side by side", blocks=tuple(blocks))


def _tell_trainings(tables: selection.Tables) -> Blocks:
    trainings = selection.find_trainings(tables)
    if not trainings:
        return []
    rows = pd.concat(trainings, ignore_index=True)
    rows = rows[rows["private"].astype(bool)] if rows["private"].any() else rows
    adapters = {"lora"} if len(set(rows["lora"].dropna())) > 1 else set()
    others = varying_axes(rows, but=_SAID - adapters)
    is_timed = rows["gpu_hours"].notna().any()
    # Speeds are of steps of one microbatch, a plan's hours of steps of many.
    speed = {} if is_timed else {name_speed(row for _, row in rows.iterrows()): _SPEED}
    columns = {
        "model": column.words(wording.name_trained),
        "size": column.words(name_size),
        "dtype": column.words(lambda row: row["dtype"]),
        **{name.replace("_", " "): column.text(name) for name in others},
        "GPUs": column.words(wording.name_gpus),
        "method": _METHOD,
        "microbatch": Column(
            lambda row: (
                row["verdict"] if pd.isna(row["safe_batch_size"]) else wording.count_batch(row)
            )
        ),
        **speed,
        "GPU hours": column.three_digits("gpu_hours"),
        "90 % interval": column.interval("gpu_hours"),
        "price": column.three_digits("price"),
        "hours / non-private": column.amount("hours_ratio", digits=2),
        "verified": _VERIFIED,
    }
    caption = "Predicted. A microbatch is the largest that safely fits one GPU."
    if is_timed:
        caption += f" {_tell_plan(tables['noise'], rows)}"
    figures = rows[["tokens_per_s", "gpu_hours", "price", "hours_ratio"]].isna()
    if (figures.any() & ~figures.all()).any():
        caption += " A dash is unknown: the appendix says why."
    if len(rows) > _MOST_ROWS:
        caption += f" These are {_MOST_ROWS} of {len(rows):,} rows; advice.csv has all."
    return _tabulate(caption, columns, rows.head(_MOST_ROWS), "advice.csv and budget.csv")


def _tell_plan(noise: pd.DataFrame, rows: pd.DataFrame) -> str:
    """Return what hours and price are those of; steps and batch where one plan has all."""
    used = noise[noise["chosen"].astype(bool)] if noise["chosen"].any() else noise
    priced = " and price" if rows["price"].notna().any() else ""
    first = used.iloc[0]
    said = f"Hours{priced} are those of {wording.name_tokens(first)} (delta {first['delta']:g}, "
    said += f"{wording.spell_large(first['samples'])} samples)"
    plans = used[used["epsilon"] == first["epsilon"]]
    if len(plans[["steps", "batch_size"]].drop_duplicates()) == 1:
        said += (
            f", in {first['steps']:,.0f} steps of {first['batch_size']:,.0f} samples with noise "
            f"multiplier {first['noise_multiplier']:.3g}"
        )
    return f"{said}."


def _tell_here(tables: selection.Tables) -> Blocks:
    rows = selection.find_here(tables["experiments"])
    if rows.empty:
        return []
    setting = rows.iloc[0]
    runs = tables["runs"]
    failures = wording.rows_in(setting, runs[runs["outcome"] != "ok"]).drop_duplicates("method")
    failed = failures[~failures["method"].isin(rows["method"])].set_index("method")["outcome"]
    verified = tables["methods"].set_index("method")["verified"]
    shown = pd.concat([rows, failed.reset_index()])
    shown = shown.assign(verified=shown["method"].map(verified))
    if over := rows["step_ratio"].notna().any() or rows["peak_ratio"].notna().any():
        figures = {
            "time over standard": Column(wording.ratio_with_interval),
            "peak over standard": column.amount("peak_ratio", digits=2),
        }
    else:
        figures = {
            "step (ms)": column.amount("median_step_s", wording.MS),
            "peak (MiB)": column.amount("peak_bytes", wording.MIB),
        }

    def or_outcome(each: Column) -> Column:
        return Column(lambda row: failed.get(row["method"]) or each.write(row))

    columns = {"method": _METHOD}
    columns |= {heading: or_outcome(each) for heading, each in figures.items()}
    caption = (
        f"Measured on {wording.THIS_MACHINE}, {wording.name_setting(setting)}: the median step "
        f"time and the {_PEAKS.get(setting['peak_kind'], '')}peak"
        + (", over those of standard" if over else "")
        + (" (95 % intervals over processes)" if rows["step_ratio_low"].notna().any() else "")
        + "."
    )
    columns["verified"] = _VERIFIED
    return tabulate(caption, columns, shown.sort_values("median_step_s"), "methods.csv")


def _tell_predicted(tables: selection.Tables) -> Blocks:
    predicted = selection.find_predicted(tables)
    if not predicted:
        return []
    rows = pd.concat(predicted.values(), ignore_index=True)
    columns = {
        "model": column.words(wording.name_setting),
        "GPUs": column.words(wording.name_gpus),
        "method": _METHOD,
        "peak (GiB)": column.three_digits("peak_bytes", wording.GIB),
        "x standard": column.amount("peak_ratio", digits=2),
        "memory": column.words(lambda row: "fits" if row["_fits"] else "does not fit"),
    }
    caption = "Predicted peaks of a step."
    return _tabulate(caption, columns, rows.assign(_fits=selection.find_fitting(rows)), "peaks.csv")


_SAID_OF_ALL = {
    ("verified", "yes"): "gradients verified",
    ("verified", "failed"): "failed verification",
    ("verified", "not known"): "gradients not verified",
}
"""How a caption says what a column has in all rows."""


def _tabulate(caption: str, columns: dict[str, Column], rows: pd.DataFrame, source: str) -> Blocks:
    """Return a table in which a text that is the same in all rows stands in the caption alone."""
    kept, said = {}, []
    for heading, each in columns.items():
        cells = {each.write(row) for _, row in rows.iterrows()}
        if cells == {"-"}:
            continue
        if len(cells) == 1 and not each.numeric and heading != "method":
            cell = f"computed in {cells.pop()}" if heading == "dtype" else cells.pop()
            said.append(_SAID_OF_ALL.get((heading, cell), cell))
        else:
            kept[heading] = each
    where = f" All rows: {', '.join(said)}." if said else ""
    return tabulate(f"{caption}{where}", kept, rows, source)


def build_trust_section(tables: selection.Tables) -> Section:
    """Return how far to trust the answer: noise; verified and reconciled; runs and caveats."""
    composition = selection.compose_peaks(tables)
    proof = [
        *count_verified(tables["verification"]),
        say_agreement(selection.find_agreement(tables)),
        _reconcile(composition),
    ]
    lines = [
        _tell_untried(composition, tables["runs"]),
        " ".join(filter(None, proof)),
        _tell_noise(tables["experiments"]),
        " ".join([_tell_runs(tables["runs"]), *_tell_caveats(tables)]),
    ]
    return Section(title=TRUST, blocks=tuple(list_items(filter(None, lines))))


def _tell_noise(experiments: pd.DataFrame) -> str:
    timed = experiments[experiments["processes"].fillna(0) > 0]
    if timed.empty:
        return "No time was measured: what is said of times is predicted."
    replicated = timed[timed["processes"] > 1]
    floors = timed["step_floor"].dropna().astype(float)
    if replicated.empty:
        return "Nothing was replicated, so how far times differ by noise alone is unknown."
    if floors.empty:
        return "How far times differ by noise alone is unknown: too few processes tell it."
    floor = wording.reach(*(wording.percent(floors.agg(end)) for end in wording.ENDS))
    said = (
        f"Measured times repeat within {floor} in 95 % of cases; smaller differences may be noise."
    )
    if once := len(timed) - len(replicated):
        said += f" {once:,} of {len(timed):,} measured experiments ran only once."
    return said


def _reconcile(composition: pd.DataFrame) -> str:
    recorded = ~composition["instrument"].isin(PREDICTIONS)
    judged = composition[composition["valid"].notna() & recorded]
    if judged.empty:
        return ""
    good = int(judged["valid"].eq(True).sum())
    gap = (judged["gap_bytes"].abs() / judged["allocator_peak_bytes"]).astype(float).max()
    return (
        f"Recorded peaks agree with the allocator's in {good:,} of {len(judged):,} "
        f"{plural(len(judged), 'experiment')} (largest gap {wording.percent(gap, 2)})."
    )


def _tell_untried(composition: pd.DataFrame, runs: pd.DataFrame) -> str:
    tried = set(composition.loc[composition["allocator_peak_bytes"].notna(), "target"])
    if not (untried := sorted(set(runs["target"].dropna()) - tried)):
        return ""
    places = sorted(set(runs.loc[~runs["instrument"].isin(PREDICTIONS), "device_name"].dropna()))
    said = f"Nothing ran on {listed(untried)}: what is said of them is predicted."
    if places:
        said += f" This report's own measurements are of {wording.THIS_MACHINE} ({listed(places)})."
    return (
        f"{said} docs/validation.md and docs/numbers/step-time.md compare predictions for GPUs "
        "with what others measured."
    )


def _tell_runs(runs: pd.DataFrame) -> str:
    ok = int((runs["outcome"] == "ok").sum())
    predicted = int(runs["instrument"].isin(PREDICTIONS).sum())
    counted = f"{len(runs):,} {plural(len(runs), 'run')}"
    if predicted:
        counted = f"{len(runs):,} {plural(len(runs), 'result')} ({len(runs) - predicted:,} measured"
        counted += f", {predicted:,} predicted)"
    success = f"{ok:,} ok ({wording.percent(ok / len(runs))})" if len(runs) else "none has a result"
    failures = wording.count_failures(runs)
    return f"{counted}: {success}.{f' Not ok: {failures}; see Outcomes.' if failures else ''}"


def _tell_caveats(tables: selection.Tables) -> Iterator[str]:
    runs, missing = tables["runs"], tables["missing"]
    damaged = int((missing["reason"] != NO_RESULT).sum())
    if absent := len(missing) - damaged:
        yield (
            f"This report is partial: {absent:,} planned "
            f"{plural(absent, 'run has', 'runs have')} no result yet."
        )
    if damaged:
        yield (
            f"This report is partial: {damaged:,} {plural(damaged, 'result')} cannot be trusted "
            f"and {plural(damaged, 'is', 'are')} left out; see Missing results."
        )
    if outdated := int((~runs["code_is_current"].astype(bool)).sum()):
        yield (
            f"{outdated:,} {plural(outdated, 'run was', 'runs were')} measured by other code than "
            "the present; to measure again, run dpprof forget --outdated, then snakemake."
        )
    counts = tables["findings"]["kind"].value_counts()
    if total := int(counts.sum()):
        kinds = [f"{MEANINGS.get(str(kind), kind)} ({count:,})" for kind, count in counts.items()]
        yield f"{total:,} {plural(total, 'caveat')}, see Caveats: {'; '.join(kinds)}."
