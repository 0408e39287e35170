"""The content of the report, composed from the tables."""

from collections.abc import Mapping, Sequence
from itertools import chain

import pandas as pd

from dpprof.results.analysis.selection import Tables, choose_runs, compose_peaks
from dpprof.results.analysis.standings import find_marks
from dpprof.results.report.answer.first_page import (
    TRUST,
    build_first_section,
    build_trust_section,
)
from dpprof.results.report.answer.sentences import ask, tell_answer
from dpprof.results.report.rendering.document import Blocks, Document, Drawing, Picture, Section
from dpprof.results.report.sections import cost, memory, outcomes, step_time
from dpprof.results.report.sections.tables import list_items, paragraph

_OTHERS = "More figures"
_FIGURES_OF: dict[str, tuple[str, ...]] = {
    memory.BUDGET: ("budget",),
    "How many GPUs it takes": ("ranks",),
    "Are predictions right here?": ("agreement",),
    "What would fit": ("predicted",),
    "Where the memory goes": ("breakdown", "timeline"),
    "Which method is fast, and which needs little memory": ("tradeoff", "throughput"),
    "Where the time goes": ("phases", "kernels"),
    "How close it is to the hardware": ("roofline",),
    "How memory and time grow": ("batch-size", "seq-len", "cost"),
    _OTHERS: (),
    "Outcomes": ("outcomes",),
}
"""The sections with figures, in their order; other packages' figures come last."""


def build_document(tables: Tables, drawings: Sequence[Drawing]) -> Document:
    """Return the content of the report.

    The first page answers; sections have a few sentences and figures, the appendix every table.
    """
    first = build_first_section(tables, drawings)
    composition = compose_peaks(tables)
    appendix = _appendix(tables, composition, drawings)
    sections: dict[str, Blocks] = {title: [] for title in _FIGURES_OF if title not in appendix}
    shown = {block.name for block in first.blocks if isinstance(block, Picture)}
    _add_figures(sections | appendix, [d for d in drawings if d.name not in shown])
    sections["What this does not say"] = _limits(tables["runs"])
    document = Document(
        title="What differentially private training costs",
        question=ask(tables),
        headline=tuple(tell_answer(tables)),
        sections=(
            *_kept({first.title: list(first.blocks)}),
            build_trust_section(tables),
            *_kept(sections),
        ),
        appendix=_kept(appendix),
    )
    unmarked = (TRUST, outcomes.VERIFICATION)  # they name what is not verified themselves
    return outcomes.mark_methods(document, find_marks(tables["verification"]), unmarked)


def _kept(sections: Mapping[str, Blocks]) -> tuple[Section, ...]:
    return tuple(
        Section(title=title, blocks=tuple(blocks)) for title, blocks in sections.items() if blocks
    )


def find_section(figure: str) -> str:
    """Return the title of the section that a figure is in."""
    home = {name: title for title, names in _FIGURES_OF.items() for name in names}
    return home.get(figure, _OTHERS)


def _add_figures(sections: Mapping[str, Blocks], drawings: Sequence[Drawing]) -> None:
    """Add the figures to their sections, those of dpprof in its order, before any table."""
    order = {name: place for place, name in enumerate(chain.from_iterable(_FIGURES_OF.values()))}
    drawn = {drawing.name: drawing.picture for drawing in drawings if drawing.missing is None}
    for name in sorted(drawn, key=lambda name: order.get(name, len(order)), reverse=True):
        sections[find_section(name)].insert(0, drawn[name])


def _appendix(
    tables: Tables, composition: pd.DataFrame, drawings: Sequence[Drawing]
) -> dict[str, Blocks]:
    runs, experiments = tables["runs"], tables["experiments"]
    costs = choose_runs(tables["costs"])
    undrawn = (f"{drawing.name}: {drawing.missing}." for drawing in drawings if drawing.missing)
    return {
        "Caveats": outcomes.tell_caveats(tables["findings"]),
        "Outcomes": outcomes.tell_outcomes(tables["outcomes"], runs),
        "Missing results": outcomes.tell_missing(tables["missing"]),
        "Comparison": step_time.by_method(tables["methods"]) + step_time.compare(experiments),
        "How far the figures repeat": step_time.repeat(experiments),
        "Capacity": memory.tell_capacity(tables["advice"]),
        "Predicted peaks": memory.predictions(composition, costs),
        "Privacy budget": memory.tell_budget(tables["noise"], tables["budget"]),
        "Owners of memory": memory.owners(composition),
        "Reconciled with the allocator": memory.reconciliation(composition, tables["peaks"]),
        "Phases": step_time.phases(tables["phases"], experiments) + cost.host_io(runs),
        "Kernels": cost.by_op_kind(tables["kernels"], tables["traces"]),
        "Ceilings": cost.bound(tables["traces"], tables["kernels"])
        + cost.ceilings(tables["ceilings"]),
        "Cost": cost.costs(costs),
        "Communication": cost.exchange(experiments),
        outcomes.VERIFICATION: outcomes.tell_verification(tables["verification"]),
        "What measuring costs": cost.instrument_overhead(tables["instrument_overhead"]),
        "Code paths": step_time.code_paths(tables["samplers"]),
        "How this was measured": _how(runs),
        "Figures without anything to show": list_items(undrawn),
    }


def _how(runs: pd.DataFrame) -> Blocks:
    facts = {
        "device": "device_name",
        "host": "hostname",
        "Python": "python",
        "torch": "torch",
        "Opacus": "opacus",
        "commit": "git_commit",
    }
    items = [
        f"{label}: {', '.join(sorted(set(runs[fact].dropna().map(str)))) or 'unknown'}"
        for label, fact in facts.items()
    ]
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
    return paragraph(method) + paragraph(f"Measured with {'; '.join(items)}.")


def _limits(runs: pd.DataFrame) -> Blocks:
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
            "What was measured holds for this machine. Ratios between methods change with the "
            "model, the batch, the sequence length and the device."
        ),
        (
            "Timelines and estimates cover tensors and known allocations of libraries. They do not "
            "cover what an allocator reserves beyond that, or the cost of fragmentation."
        ),
    ]
    if len(runs) and "cuda" not in set(runs.loc[runs["target"].isna(), "device"]):
        said.append("Nothing here was measured on a GPU.")
    return list_items(said)
