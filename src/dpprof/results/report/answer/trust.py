"""Can I believe this? What did not run, proof, noise and caveats, in four lines."""

import pandas as pd

from dpprof.experiments.config.registry import PREDICTIONS
from dpprof.results.analysis.collection import NO_RESULT
from dpprof.results.analysis.selection import Tables, compose_peaks, find_agreement
from dpprof.results.figures.agreement import say_agreement
from dpprof.results.report.rendering.document import Bullets, Section
from dpprof.results.report.sections.outcomes import MEANINGS
from dpprof.results.report.sections.verification import count_verified
from dpprof.results.report.wording import (
    ENDS,
    THIS_MACHINE,
    count_failures,
    listed,
    percent,
    plural,
    reach,
)

TITLE = "Can I believe this?"


def build_trust_section(tables: Tables) -> Section:
    """Return how far to trust the answer: noise; verified and reconciled; runs and caveats."""
    composition = compose_peaks(tables)
    proof = [
        *count_verified(tables["verification"]),
        *filter(None, [say_agreement(find_agreement(tables)), _reconcile(composition)]),
    ]
    lines = [
        _tell_untried(composition, tables["runs"]),
        " ".join(proof),
        _tell_noise(tables["experiments"]),
        " ".join(_tell_runs(tables)),
    ]
    return Section(title=TITLE, blocks=(Bullets(items=tuple(filter(None, lines))),))


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
    floor = reach(*(percent(floors.agg(end)) for end in ENDS))
    said = (
        f"Measured times repeat within {floor} in 95 % of cases; smaller differences may be noise."
    )
    if once := len(timed) - len(replicated):
        said += f" {once:,} of {len(timed):,} measured experiments ran only once."
    return said


def _reconcile(composition: pd.DataFrame) -> str:
    """Say whether recorded peaks are the allocator's; empty where there are none."""
    recorded = ~composition["instrument"].isin(PREDICTIONS)
    judged = composition[composition["valid"].notna() & recorded]
    if judged.empty:
        return ""
    good = int(judged["valid"].eq(True).sum())
    gap = (judged["gap_bytes"].abs() / judged["allocator_peak_bytes"]).astype(float).max()
    return (
        f"Recorded peaks agree with the allocator's in {good:,} of {len(judged):,} "
        f"{plural(len(judged), 'experiment')} (largest gap {percent(gap, 2)})."
    )


def _tell_untried(composition: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Say on which targets nothing ran, and where something did; empty where it did on all."""
    tried = set(composition.loc[composition["allocator_peak_bytes"].notna(), "target"])
    if not (untried := sorted(set(runs["target"].dropna()) - tried)):
        return ""
    places = sorted(set(runs.loc[~runs["instrument"].isin(PREDICTIONS), "device_name"].dropna()))
    said = f"Nothing ran on {listed(untried)}: what is said of them is predicted."
    if places:
        said += f" This report's own measurements are of {THIS_MACHINE} ({listed(places)})."
    return (
        f"{said} docs/validation.md and docs/numbers/step-time.md compare predictions for GPUs "
        "with what others measured."
    )


def _tell_runs(tables: Tables) -> list[str]:
    runs, missing = tables["runs"], tables["missing"]
    ok = int((runs["outcome"] == "ok").sum())
    predicted = int(runs["instrument"].isin(PREDICTIONS).sum())
    counted = f"{len(runs):,} {plural(len(runs), 'run')}"
    if predicted:
        counted = f"{len(runs):,} {plural(len(runs), 'result')} ({len(runs) - predicted:,} measured"
        counted += f", {predicted:,} predicted)"
    success = f"{ok:,} ok ({percent(ok / len(runs))})" if len(runs) else "none has a result"
    said = [f"{counted}: {success}."]
    if failures := count_failures(runs):
        said.append(f"Not ok: {failures}; see Outcomes.")
    damaged = int((missing["reason"] != NO_RESULT).sum())
    if absent := len(missing) - damaged:
        said.append(
            f"This report is partial: {absent:,} planned "
            f"{plural(absent, 'run has', 'runs have')} no result yet."
        )
    if damaged:
        said.append(
            f"This report is partial: {damaged:,} {plural(damaged, 'result', 'results')} cannot be "
            f"trusted and {plural(damaged, 'is', 'are')} left out; see Missing results."
        )
    outdated = int((~runs["code_is_current"].astype(bool)).sum())
    if outdated:
        said.append(
            f"{outdated:,} {plural(outdated, 'run was', 'runs were')} measured by other code than "
            "the present; to measure again, run dpprof forget --outdated, then snakemake."
        )
    counts = tables["findings"]["kind"].value_counts()
    if len(counts):
        kinds = [f"{MEANINGS.get(str(kind), kind)} ({count:,})" for kind, count in counts.items()]
        total = int(counts.sum())
        said.append(f"{total:,} {plural(total, 'caveat')}, see Caveats: {'; '.join(kinds)}.")
    return said
