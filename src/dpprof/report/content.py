"""The content of the report, composed from the tables."""

from collections.abc import Mapping, Sequence

import pandas as pd

from dpprof.analysis.collection import NO_RESULT
from dpprof.analysis.peak_composition import choose, compose
from dpprof.analysis.standings import find_marks
from dpprof.records.terms import OUTCOMES
from dpprof.report import kernel_sections, memory_sections, outcome_section, time_sections
from dpprof.report.advice_section import tell_advice, tell_capacity
from dpprof.report.budget_section import TITLE as BUDGET
from dpprof.report.budget_section import tell_budget
from dpprof.report.cells import Cell, column, plural, tabulate
from dpprof.report.document import (
    Blocks,
    Bullets,
    Document,
    Drawing,
    Paragraph,
    Picture,
    Section,
    Table,
)
from dpprof.report.sentences import tell_findings, tell_memory
from dpprof.report.verification_section import TITLE as VERIFICATION
from dpprof.report.verification_section import count_verified, mark_methods, tell_verification

Tables = Mapping[str, pd.DataFrame]

_FIGURES_OF = {
    "Memory": ("breakdown", "timeline"),
    BUDGET: ("budget",),
    "Time": ("tradeoff", "phases", "throughput"),
    "Kernels": ("kernels",),
    "Roofline": ("roofline", "bound"),
    "Cost": ("cost",),
    "Growth": ("batch-size", "seq-len"),
    "Reconciled with the allocator": ("accuracy",),
    "Outcomes": ("outcomes",),
}
"""The section of each of dpprof's own figures; other packages' figures have their own section."""


def build_document(tables: Tables, drawings: Sequence[Drawing]) -> Document:
    """Return the content of the report."""
    experiments = tables["experiments"]
    composition, costs = compose(tables), choose(tables["costs"])
    targets = sorted(set(composition["target"].dropna()))
    predicted = f"Predicted for {', '.join(targets) or 'targets'}"
    sections: dict[str, Blocks] = {
        "Findings": [
            *tell_findings(tables["settings"], tables["methods"]),
            *tell_memory(composition),
            *tell_advice(tables["advice"]),
            *_caveats(tables["findings"]),
        ],
        "Memory": [*memory_sections.owners(composition)],
        predicted: [*memory_sections.predictions(composition, costs)],
        "What fits, and what to use": [*tell_capacity(tables["advice"])],
        BUDGET: [*tell_budget(tables["noise"], tables["budget"])],
        "Time": [
            *time_sections.phases(tables["phases"], experiments),
            *kernel_sections.host_io(tables["runs"]),
        ],
        "Kernels": [*kernel_sections.by_op_kind(tables["kernels"], tables["traces"])],
        "Roofline": [
            *kernel_sections.bound(tables["traces"], tables["kernels"]),
            *kernel_sections.ceilings(tables["ceilings"]),
        ],
        "Cost": [*memory_sections.costs(costs)],
        "Growth": [],
        "Comparison": [
            *time_sections.by_method(tables["methods"]),
            *time_sections.compare(experiments),
        ],
        VERIFICATION: [*tell_verification(tables["verification"])],
        "Reconciled with the allocator": [
            *memory_sections.reconciliation(composition, tables["peaks"])
        ],
        "How far the figures repeat": [*time_sections.repeat(experiments)],
        "What measuring costs": [
            *kernel_sections.instrument_overhead(tables["instrument_overhead"])
        ],
        "Code paths": [*time_sections.code_paths(tables["samplers"])],
        "Outcomes": outcome_section.tell_outcomes(tables["outcomes"], tables["runs"]),
        "Missing results": outcome_section.tell_missing(tables["missing"]),
        "More figures": [],
        "How this was measured": _how(tables["runs"]),
        "What this does not say": _limits(tables["runs"], composition, drawings),
    }
    homes = _FIGURES_OF | {predicted: ("predicted",)}
    home = {figure: title for title, figures in homes.items() for figure in figures}
    order = {figure: position for position, figure in enumerate(home)}
    drawn = [drawing for drawing in drawings if drawing.missing is None]
    for drawing in sorted(drawn, key=lambda one: order.get(one.name, len(order)), reverse=True):
        picture = Picture(name=drawing.name, caption=drawing.caption)
        sections[home.get(drawing.name, "More figures")].insert(0, picture)
    document = Document(
        title="What differentially private training costs",
        headline=_headline(tables),
        sections=tuple(
            Section(title=title, blocks=tuple(blocks))
            for title, blocks in sections.items()
            if blocks
        ),
    )
    return mark_methods(document, find_marks(tables["verification"]))


def _headline(tables: Tables) -> tuple[str, ...]:
    runs, missing = tables["runs"], tables["missing"]
    ok = int((runs["outcome"] == "ok").sum())
    experiments = runs["experiment_id"].nunique()
    counted = f"{len(runs):,} {plural(len(runs), 'run')} of {experiments:,} "
    success = f"{ok:,} ok ({ok / len(runs):.0%})" if len(runs) else "none has a result"
    said = [f"{counted}{plural(experiments, 'experiment')}: {success}."]
    failures = [
        f"{count:,} {outcome}"
        for outcome in OUTCOMES[1:]
        if (count := int((runs["outcome"] == outcome).sum()))
    ]
    said += count_verified(tables["verification"])
    if failures:
        said.append(f"Not ok: {', '.join(failures)}; see Outcomes.")
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
    if caveats := len(tables["findings"]):
        said.append(
            f"Read {caveats:,} {plural(caveats, 'caveat')} under Findings before the numbers."
        )
    outdated = int((~runs["code_is_current"].astype(bool)).sum())
    if outdated:
        said.append(
            f"{outdated:,} {plural(outdated, 'run was', 'runs were')} measured by other code than "
            "the present; to measure again, run dpprof forget --outdated, then snakemake."
        )
    return tuple(said)


def _caveats(findings: pd.DataFrame) -> list[Table | Paragraph]:
    if findings.empty:
        return []
    columns: dict[str, Cell] = {
        "experiment": lambda row: f"{row['experiment_id']} {row['instrument']}",
        "caveat": column("finding"),
    }
    caption = "Read these caveats before the numbers."
    source = "results/tables/findings.csv"
    return [tabulate(caption, columns, findings, tuple(columns), source)]


def _how(runs: pd.DataFrame) -> Blocks:
    facts = [
        ("device", "device_name"),
        ("host", "hostname"),
        ("Python", "python"),
        ("torch", "torch"),
        ("Opacus", "opacus"),
        ("commit", "git_commit"),
    ]
    items = []
    for label, fact in facts:
        values = sorted({str(value) for value in runs[fact].dropna()})
        items.append(f"{label}: {', '.join(values) if values else 'unknown'}")
    if runs["git_dirty"].eq(True).any():
        items.append("some runs were measured with uncommitted changes in the checkout")
    method = (
        "Every run is one fresh process under one instrument. The instrument clean runs only the "
        "training step and a timer: first warm-up steps, then timed steps. Step times come from "
        "clean only; the raw times are in results/tables/steps.csv. The instrument phases reads "
        "the allocator and times phases. The instrument memory records every storage of a real "
        "step, with its owner and lifetime; estimate does the same for a step of tensors without "
        "memory, which needs no device. The instrument kernels traces a few steps with "
        "torch.profiler. Each replicate is a separate process. docs/numbers explains what "
        "each number means and does not mean. The result files hold all numbers and the full "
        "environment of each run."
    )
    return [Paragraph(text=method), Paragraph(text=f"Measured with {'; '.join(items)}.")]


def _limits(runs: pd.DataFrame, composition: pd.DataFrame, drawings: Sequence[Drawing]) -> Blocks:
    """Return what the numbers do not show, and which figures are missing."""
    said = [
        (
            "Tokens and weights are random: the report shows cost, not learning. It computes noise "
            "for a privacy budget only where the config has one."
        ),
        (
            "Every batch has exactly the configured size. Poisson-sampled batches vary, and the "
            "largest decides the memory."
        ),
        (
            "Numbers hold for this machine. Ratios between methods change with the model, the "
            "batch, the sequence length and the device."
        ),
        (
            "Timelines and estimates cover tensors and known allocations of libraries. They do not "
            "cover what an allocator reserves beyond that, or the cost of fragmentation."
        ),
    ]
    if len(runs) and "cuda" not in set(runs.loc[runs["target"].isna(), "device"]):
        said.append("Nothing here was measured on a GPU.")
    untried = composition["target"].notna() & composition["allocator_peak_bytes"].isna()
    if targets := sorted(set(composition.loc[untried, "target"])):
        said.append(f"No prediction for {', '.join(targets)} was compared with a measurement.")
    said += [f"There is no figure {one.name}: {one.missing}." for one in drawings if one.missing]
    return [Bullets(items=tuple(said))]
