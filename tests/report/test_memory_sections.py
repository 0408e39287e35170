"""What the report makes of recorded memory: every number against one that was put in."""

import pytest
from factory import make_experiment, make_memory, tables_of_runs
from reading import section_of, table_of, titles_of

from dpprof.experiments.config.datasheets import L4
from dpprof.experiments.records.terms import COMPONENTS
from dpprof.results.report.content import build_document
from dpprof.results.report.rendering.document import Document, Drawing

MIB = 2**20
GIB = 2**30
STANDARD = make_experiment(method="standard")
HOOKS = make_experiment(method="opacus-hooks")
OWNED = {"parameters": 10 * MIB, "gradients": 30 * MIB}


def kept(experiment, instrument="memory", owned=OWNED, **fields):
    return experiment, instrument, {"recorded": make_memory(owned, **fields)}


def on(target, method, **fields):
    return make_experiment(method=method, device="cuda", target=target, **fields)


def document_of(root, *runs) -> Document:
    return build_document(tables_of_runs(root, *runs), [])


def test_owners_at_the_peak_are_told_in_mib(tmp_path) -> None:
    private = OWNED | {"noise": 59 * MIB, "norm_samples": MIB // 2}
    document = document_of(tmp_path, kept(STANDARD), kept(HOOKS, "estimate", private))
    hooks, standard = table_of(document, "Owners of memory")

    told = [hooks[name] for name in ("peak", "parameters", "gradients", "noise", "other")]
    assert told == ["99.5", "10.0", "30.0", "59.0", "0.5"]
    assert [standard[name] for name in ("peak", "noise", "other")] == ["40.0", "0.0", "0.0"]
    # Half a MiB is less than 1 % of the only peak that it is in.
    assert "norm samples" not in hooks


def test_only_the_eight_that_own_most_have_a_column(tmp_path) -> None:
    owned = {name: (2 + rank) * MIB for rank, name in enumerate(COMPONENTS)}
    (row,) = table_of(document_of(tmp_path, kept(STANDARD, owned=owned)), "Owners of memory")

    shown = [name.replace("_", " ") for name in COMPONENTS[-8:]]
    assert list(row) == ["model", "T", "B", "method", "peak", *shown, "other"]
    assert row["other"] == f"{sum(2 + rank for rank in range(len(COMPONENTS) - 8)):.1f}"


def test_what_makes_the_peak_is_told(tmp_path) -> None:
    document = document_of(tmp_path, kept(STANDARD, phase="second_backward", op="bmm"))
    (row,) = table_of(document, "Owners of memory", 1)

    told = [row[name] for name in ("peak (MiB)", "phase", "operator", "module", "from")]
    assert told == ["40.0", "second backward", "bmm", "blocks.0", "memory"]


def test_predictions_are_told_for_a_target_and_not_among_what_is_here(tmp_path) -> None:
    ceiling = {"roofline_step_s": 0.002, "dp_flop_multiplier": 1.5}
    half = L4.memory_bytes // 2
    document = document_of(
        tmp_path,
        kept(on("l4", "standard"), "estimate", {"parameters": half}, **ceiling),
        kept(on("l4", "opacus-hooks"), "estimate", {"parameters": 3 * half}, **ceiling),
        kept(on("l4", "standard", batch_size=9), "estimate", {"parameters": GIB}),
    )
    hooks, standard, other = table_of(document, "Predicted peaks")

    assert (hooks["B"], hooks["method"], hooks["ratio"]) == ("2", "opacus-hooks", "3.00")
    assert standard["peak (GiB)"] == f"{half / GIB:.2f}"
    assert (standard["of the memory"], hooks["of the memory"]) == ("50 %", "does not fit (150 %)")
    assert (hooks["FLOP multiplier"], hooks["least step (ms)"]) == ("1.50", "2.00")
    assert hooks["tokens/s at most"] == "4,000"  # 2 samples of 4 tokens in 2 ms
    assert (other["B"], other["ratio"], other["peak (GiB)"]) == ("9", "1.00", "1.00")
    assert (other["least step (ms)"], other["tokens/s at most"]) == ("-", "-")
    assert not {"Memory", "Owners of memory"} & set(titles_of(document))


def needs_of_l4(root, **memory) -> dict[str, str]:
    """What is predicted for an L4 of a step of which these figures of memory are recorded."""
    recorded = make_memory({"parameters": GIB})
    recorded["memory"] |= memory
    run = (on("l4", "standard"), "estimate", {"recorded": recorded})
    return table_of(document_of(root, run), "Predicted peaks")[0]


def test_the_first_step_must_fit_too(tmp_path) -> None:
    needs = needs_of_l4(tmp_path, first_step_peak_allocated_bytes=2 * L4.memory_bytes)
    assert needs["of the memory"] == "does not fit (200 %)"


@pytest.mark.parametrize(
    ("reserved", "fits", "share"),
    [
        (L4.memory_bytes // 2, True, "50 %"),
        (2 * L4.memory_bytes, True, "200 %, with retries"),
        (2 * L4.memory_bytes, False, "does not fit (200 %)"),
    ],
)
def test_what_the_allocator_would_reserve_decides_what_fits(
    tmp_path, reserved, fits, share
) -> None:
    names = ("requested_bytes", "allocated_bytes", "expandable_reserved_bytes")
    simulated = dict.fromkeys(names, GIB) | {"reserved_bytes": reserved, "settled": True}
    simulated |= {"limit_bytes": L4.memory_bytes, "fits": fits, "retries": 3 if fits else None}
    needs = needs_of_l4(tmp_path, allocator=simulated)

    assert needs["reserved (GiB)"] == f"{reserved / GIB:.2f}"
    assert needs["of the memory"] == share


CONFIGURED = {"memory_bytes": "24GiB", "flops_per_s": 1e14, "bandwidth_bytes_per_s": 2e12}


@pytest.mark.parametrize(
    ("device", "target", "share"), [("cpu", "cpu", "-"), ("cuda", CONFIGURED, "25 %")]
)
def test_the_share_is_that_of_the_targets_memory_if_it_says_any(
    tmp_path, device, target, share
) -> None:
    experiment = make_experiment(method="standard", device=device, target=target)
    document = document_of(tmp_path, kept(experiment, "estimate", {"parameters": 6 * GIB}))

    assert table_of(document, "Predicted peaks")[0]["of the memory"] == share


def test_gaps_are_told_in_bytes_with_their_bound(tmp_path) -> None:
    other = make_experiment(method="opacus-hooks", batch_size=9)
    document = document_of(
        tmp_path,
        (STANDARD, "phases", {"peak_allocated_bytes": 40 * MIB + 12}),
        kept(STANDARD),
        kept(STANDARD, "estimate"),
        (HOOKS, "phases", {"peak_allocated_bytes": 100 * MIB}),
        kept(HOOKS),
        kept(HOOKS, "estimate", {"parameters": 41 * MIB}),
        kept(other, "estimate"),
        kept(on("l4", "standard"), "estimate"),
    )
    hooks, standard, unknown = table_of(document, "Reconciled with the allocator")
    told = ["recorded (MiB)", "from", "allocator (MiB)", "gap", "bound", "reconciled", "estimate"]

    assert [standard[name] for name in told] == [
        *("40.00", "memory", "40.00", "12", "65,536", "yes", "equal"),
    ]
    gap, bound = f"{60 * MIB:,}", f"{100 * MIB // 1000:,}"
    assert [hooks[name] for name in told] == [
        *("40.00", "memory", "100.00", gap, bound, "no", f"+{MIB:,}"),
    ]
    assert [unknown[name] for name in told] == ["40.00", "estimate", "-", "-", "-", "-", "-"]
    assert f"{gap} bytes more than recorded" in table_of(document, "Caveats")[0]["caveat"]


def test_evidence_is_told_in_percent_of_the_peak(tmp_path) -> None:
    recorded = make_memory({"parameters": 70, "noise": 20, "unattributed": 10})
    recorded["memory"]["attribution"]["evidence"] = {"identity": 70, "birthplace": 15, "phase": 5}
    document = document_of(tmp_path, (STANDARD, "memory", {"recorded": recorded}))
    (row,) = table_of(document, "Reconciled with the allocator", 1)

    kinds = ("identity", "birthplace", "phase", "unattributed")
    assert [row[kind] for kind in kinds] == ["70.00", "15.00", "5.00", "10.00"]


def test_costs_are_told_with_three_digits_and_without_what_nobody_knows(tmp_path) -> None:
    run = kept(STANDARD, model_flops=123_456_000_000, executed_flops=4_000_000)
    run[2]["recorded"]["io"] |= {"bytes_read": 5 * GIB, "bytes_written": GIB // 32}
    (row,) = table_of(document_of(tmp_path, run), "Cost")

    assert {name: text for name, text in row.items() if name not in ("model", "T", "B")} == {
        "method": "standard",
        "model GFLOP": "123",
        "executed": "0.00400",
        "multiplier": "2.00",
        "GiB read": "5.00",
        "written": "0.0312",
        "FLOP/byte": "2.50",
    }


def test_utilisation_is_told_where_ceiling_and_time_are_known(tmp_path) -> None:
    """40 and 100 FLOPs in 2 s at 1,000 a second."""
    known = {"peak_flops_per_s": 1_000.0, "roofline_step_s": 0.25}
    run = kept(STANDARD, model_flops=40, executed_flops=100, **known)
    document = document_of(tmp_path, run, (STANDARD, "clean", {"step_s": (2.0,)}))
    (row,) = table_of(document, "Cost")

    told = [row[name] for name in ("MFU (%)", "HFU (%)", "least step (ms)")]
    assert told == ["2.00", "5.00", "250"]


def test_costs_on_targets_have_a_table_of_their_own(tmp_path) -> None:
    there = kept(on("l4", "standard"), "estimate", roofline_step_s=0.25)
    document = document_of(tmp_path, kept(STANDARD), there)
    (here,), (elsewhere,) = (table_of(document, "Cost", index) for index in (0, 1))

    assert "least step (ms)" not in here
    assert elsewhere["least step (ms)"] == "250"


def test_without_recorded_memory_there_is_no_such_section(tmp_path) -> None:
    document = document_of(tmp_path, (STANDARD, "clean", {}))
    titles = set(titles_of(document))

    assert not titles & {"Memory", "Owners of memory", "Cost", "Reconciled with the allocator"}
    assert not titles & {"Capacity", "Privacy budget"}
    assert not [title for title in titles if title.startswith("Predicted")]


def limits(document) -> tuple[str, ...]:
    return document.sections[-1].blocks[0].items


def test_a_target_is_no_gpu_that_was_measured_on(tmp_path) -> None:
    document = document_of(tmp_path, kept(STANDARD), kept(on("l4", "standard"), "estimate"))

    assert "Nothing here was measured on a GPU." in limits(document)


def test_what_was_measured_here_is_no_prediction(tmp_path) -> None:
    on_gpu = make_experiment(method="standard", device="cuda")
    document = document_of(tmp_path, kept(STANDARD), kept(on_gpu))

    assert not [text for text in limits(document) if "GPU" in text or "predicted" in text]


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
