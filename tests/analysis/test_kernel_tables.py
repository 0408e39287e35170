"""Times of a trace beside recorded FLOPs and bytes, by hand.

The synthetic ceilings are 1,000 FLOP/s and 40 bytes/s: 25 FLOPs a byte is where both bind. The
synthetic memory has 4,000 FLOPs of gemm in forward and 10 of the optimizer in step, 40 bytes
each: 100 FLOPs a byte, and a quarter.
"""

import pytest
from factory import make_experiment, make_kernels, make_memory, tables_of_runs
from reading import section_of, table_of

from dpprof.results.report.content import build_document

TRACED = {("forward", "gemm"): 8.0, ("step", "optimizer"): 2.0, ("noise", "random"): 1.0}
EXPERIMENT = make_experiment()
RECORDED = EXPERIMENT, "memory", {"recorded": make_memory({"parameters": 4})}
CLEAN = EXPERIMENT, "clean", {"step_s": (8.0,)}


def traced(**fields):
    return EXPERIMENT, "kernels", {"kernels": make_kernels(TRACED, idle_s=4.0, **fields)}


@pytest.fixture
def tables(tmp_path):
    return tables_of_runs(tmp_path, CLEAN, RECORDED, traced(), ceilings={})


def test_rates_and_what_binds(tables) -> None:
    rows = tables["kernels"].set_index(["phase", "op_kind"])
    gemm = rows.loc[("forward", "gemm")]
    optimizer = rows.loc[("step", "optimizer")]

    assert gemm["arithmetic_intensity"] == 100
    assert (gemm["flops_per_s"], gemm["bytes_per_s"], gemm["bound"]) == (500, 5, "compute")
    assert optimizer["arithmetic_intensity"] == 0.25
    assert (optimizer["flops_per_s"], optimizer["bytes_per_s"]) == (5, 20)
    assert optimizer["bound"] == "memory"
    # What was not recorded is not guessed.
    assert rows.loc[("noise", "random")].drop(["seconds", "launches"])["flops":].isna()["bound"]


def test_a_step_is_divided_by_what_binds_it(tables) -> None:
    (row,) = tables["traces"].to_dict("records")

    assert [row[f"{bound}_bound_s"] for bound in ("compute", "memory")] == [8.0, 2.0]
    assert (row["unknown_s"], row["idle_s"], row["step_s"]) == (1.0, 4.0, 15.0)
    assert row["launch_latency_s"] == 0.001


def test_the_cpus_peak_is_what_was_measured_on_it(tables) -> None:
    """100 executed FLOPs, of which 50 are needed, in 8 s, against 1,000 FLOP/s."""
    (row,) = tables["costs"].to_dict("records")

    assert row["hfu"] == pytest.approx(100 / 8 / 1000)
    assert row["mfu"] == pytest.approx(50 / 8 / 1000)
    source = "the fastest float32 matrix product measured on synthetic cpu, n = 10"
    assert row["peak_source"] == source


def test_without_ceilings_nothing_is_said_to_bind(tmp_path) -> None:
    tables = tables_of_runs(tmp_path, CLEAN, RECORDED, traced())

    assert tables["kernels"]["bound"].isna().all()
    assert tables["kernels"]["flops_per_s"].notna().any()
    assert tables["traces"]["unknown_s"].tolist() == [11.0]


def test_a_dtype_without_ceilings_says_why(tmp_path) -> None:
    products = {"float32": None, "tf32": None, "bfloat16": None, "float64": None}
    reasons = {"matmul.float32": "it took too long"}
    fields = {"matmul": products, "reasons": reasons}
    (row,) = tables_of_runs(tmp_path, CLEAN, RECORDED, ceilings=fields)["costs"].to_dict("records")

    assert row["utilisation_reason"].endswith("it took too long")


def test_kernels_of_no_known_kind_are_a_finding(tmp_path) -> None:
    other = {("forward", "gemm"): 9.0, ("forward", "other"): 1.0}
    run = EXPERIMENT, "kernels", {"kernels": make_kernels(other)}
    findings = tables_of_runs(tmp_path, run)["findings"].query("kind == 'other-kernels'")

    assert findings["finding"].tolist() == ["10% of its kernels' time has no known op kind"]


def test_ceilings_measured_on_a_busy_machine_are_a_finding(tmp_path) -> None:
    findings = tables_of_runs(tmp_path, CLEAN, ceilings={"others_busy_cores": 1.2})["findings"]
    (row,) = findings.query("kind == 'ceilings-contended'").to_dict("records")

    assert row["experiment_id"] == "cpu-synthetic-cpu-2-cores"
    assert row["finding"].startswith("other processes kept 1.2 cores busy")


def test_kernels_faster_than_the_ceilings_are_a_finding(tmp_path) -> None:
    """4,000 FLOPs in 2 s are twice the ceiling of 1,000 FLOP/s, and kept so."""
    fast = {("forward", "gemm"): 2.0, ("step", "optimizer"): 0.01}
    run = EXPERIMENT, "kernels", {"kernels": make_kernels(fast)}
    tables = tables_of_runs(tmp_path, CLEAN, RECORDED, run, ceilings={})
    (row,) = tables["findings"].query("kind == 'ceilings-exceeded'").to_dict("records")

    assert tables["kernels"]["flops_per_s"].max() == 2000
    assert row["experiment_id"] == "cpu-synthetic-cpu-2-cores"
    # The optimizer's bytes were faster than the memory too, which caches can be.
    assert row["finding"].startswith("kernels ran at up to 2.0 times the fastest measured matrix")


def test_the_report_tells_kernels_and_what_binds(tables) -> None:
    document = build_document(tables, [])
    (kernels,) = table_of(document, "Kernels")
    (bound,) = table_of(document, "Ceilings")

    assert (kernels["gemm"], kernels["idle"], kernels["step"]) == ("8,000.0", "4,000.0", "15,000.0")
    shares = [bound[name] for name in ("compute bound", "memory bound", "idle")]
    assert shares == ["53 %", "13 %", "27 %"]
    # 4,000 FLOPs in 8 s of 1,000 FLOP/s; 40 bytes in 2 s of 40 bytes/s.
    assert (bound["of peak FLOP/s"], bound["of bandwidth"]) == ("50 %", "50 %")


def test_the_report_tells_ceilings_and_what_utilisation_is_against(tables) -> None:
    document = build_document(tables, [])
    ceilings = {row["figure"]: row["measured"] for row in table_of(document, "Ceilings", 1)}
    said = [
        block.text for block in section_of(document, "Cost").blocks if block.kind == "paragraph"
    ]

    assert ceilings["launch"] == "1,000"
    assert ceilings["tf32 products"] == "-"
    assert "the fastest float32 matrix product measured on synthetic cpu, n = 10" in said[0]
