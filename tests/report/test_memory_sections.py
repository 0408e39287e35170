"""What the report makes of recorded memory: every number against one that was put in."""

import pytest
from factory import make_experiment, make_memory, tables_of_runs
from reading import section_of, titles_of
from snapshots import assert_reviewed

from dpprof.experiments.config.datasheets import L4
from dpprof.experiments.records.terms import COMPONENTS
from dpprof.results.report.content import build_document
from dpprof.results.report.rendering.document import Drawing, Table

MIB = 2**20
GIB = 2**30
STANDARD = make_experiment(method="standard")
HOOKS = make_experiment(method="opacus-hooks")
OWNED = {"parameters": 10 * MIB, "gradients": 30 * MIB}


def kept(experiment, instrument="memory", owned=OWNED, **fields):
    return experiment, instrument, {"recorded": make_memory(owned, **fields)}


def on(target, method, **fields):
    return make_experiment(method=method, device="cuda", target=target, **fields)


def fitting(on_target=None, **memory):
    """What is predicted of a step of which these figures of memory are recorded."""
    recorded = make_memory({"parameters": 6 * GIB})
    recorded["memory"] |= memory
    return on_target or on("l4", "standard"), "estimate", {"recorded": recorded}


def reserving(share: float, *, fits: bool):
    """What the allocator would reserve of an L4."""
    names = ("requested_bytes", "allocated_bytes", "expandable_reserved_bytes")
    simulated = dict.fromkeys(names, GIB) | {"settled": True, "retries": 3 if fits else None}
    simulated |= {"reserved_bytes": int(share * L4.memory_bytes), "fits": fits}
    return fitting(allocator=simulated | {"limit_bytes": L4.memory_bytes})


def with_parts(run, **parts):
    """Replace figures of a run's record."""
    for name, figures in parts.items():
        run[2]["recorded"][name] |= figures
    return run


PRIVATE = OWNED | {"noise": 59 * MIB, "norm_samples": MIB // 2}
MANY = {name: (2 + rank) * MIB for rank, name in enumerate(COMPONENTS)}
CEILING = {"roofline_step_s": 0.002, "dp_flop_multiplier": 1.5}
HALF = L4.memory_bytes // 2
CONFIGURED = {"memory_bytes": "24GiB", "flops_per_s": 1e14, "bandwidth_bytes_per_s": 2e12}
EVIDENCE = {"identity": 70, "birthplace": 15, "phase": 5}
UNSURE = kept(STANDARD, owned={"parameters": 70, "noise": 20, "unattributed": 10})
UNSURE[2]["recorded"]["memory"]["attribution"]["evidence"] = EVIDENCE
MOVED = {"bytes_read": 5 * GIB, "bytes_written": GIB // 32}
KNOWN = {"peak_flops_per_s": 1_000.0, "roofline_step_s": 0.25}
RUNS = {
    # Half a MiB is less than 1 % of the only peak that it is in: "other" has it.
    "owners": [kept(STANDARD, phase="second_backward", op="bmm"), kept(HOOKS, "estimate", PRIVATE)],
    "many owners": [kept(STANDARD, owned=MANY)],
    # 2 samples of 4 tokens in 2 ms are at most 4,000 tokens/s.
    "predictions": [
        kept(on("l4", "standard"), "estimate", {"parameters": HALF}, **CEILING),
        kept(on("l4", "opacus-hooks"), "estimate", {"parameters": 3 * HALF}, **CEILING),
        kept(on("l4", "standard", batch_size=9), "estimate", {"parameters": GIB}),
    ],
    "a first step that is too large": [
        fitting(first_step_peak_allocated_bytes=2 * L4.memory_bytes)
    ],
    "a half reserved": [reserving(0.5, fits=True)],
    "retries": [reserving(2, fits=True)],
    "no room": [reserving(2, fits=False)],
    "a target without memory": [fitting(make_experiment(target="cpu"))],
    "a target with memory": [fitting(make_experiment(device="cuda", target=CONFIGURED))],
    "gaps": [
        (STANDARD, "phases", {"peak_allocated_bytes": 40 * MIB + 12}),
        kept(STANDARD),
        kept(STANDARD, "estimate"),
        (HOOKS, "phases", {"peak_allocated_bytes": 100 * MIB}),
        kept(HOOKS),
        kept(HOOKS, "estimate", {"parameters": 41 * MIB}),
        kept(make_experiment(method="opacus-hooks", batch_size=9), "estimate"),
        kept(on("l4", "standard"), "estimate"),
    ],
    "evidence": [UNSURE],
    "costs": [
        with_parts(kept(STANDARD, model_flops=123_456_000_000, executed_flops=4_000_000), io=MOVED)
    ],
    # 40 and 100 FLOPs in 2 s at 1,000 a second are 2 and 5 %.
    "utilisation": [
        kept(STANDARD, model_flops=40, executed_flops=100, **KNOWN),
        (STANDARD, "clean", {"step_s": (2.0,)}),
    ],
    "costs on targets": [
        kept(STANDARD),
        kept(on("l4", "standard"), "estimate", roofline_step_s=0.25),
    ],
    "no recorded memory": [(STANDARD, "clean", {})],
    "a gpu": [kept(STANDARD), kept(make_experiment(method="standard", device="cuda"))],
}
TABLES = (
    *("Owners of memory", "Predicted peaks", "Reconciled with the allocator", "Cost"),
    "Caveats",
)


def spell(document) -> str:
    """The titles of a report, the tables on memory and costs, and what was not measured."""
    lines = ["; ".join(titles_of(document))]
    for title in (title for title in TABLES if title in titles_of(document)):
        for block in section_of(document, title).blocks:
            if isinstance(block, Table):
                lines += ["", title, *(" | ".join(row) for row in (block.header, *block.rows))]
    text = "\n".join([*lines, "", *document.sections[-1].blocks[0].items, ""])
    return text.replace(HOOKS.id, "hooks")


@pytest.mark.parametrize("name", RUNS)
def test_what_is_told_of_memory_and_costs_reads_as_it_was_reviewed(name, tmp_path) -> None:
    document = build_document(tables_of_runs(tmp_path, *RUNS[name]), [])

    assert_reviewed(f"report/memory - {name}", spell(document))


@pytest.mark.parametrize(
    ("figure", "title"),
    [
        ("throughput", "Which method is fast, and which needs little memory"),
        ("ranks", "How many GPUs it takes"),
    ],
)
def test_figures_stand_with_what_they_show(figure, title, tmp_path) -> None:
    tables = tables_of_runs(tmp_path, kept(STANDARD), kept(on("l4", "standard"), "estimate"))
    document = build_document(tables, [Drawing(name=figure, caption="c", missing=None)])

    assert figure in [getattr(block, "name", "") for block in section_of(document, title).blocks]
