"""MFU and HFU by hand; unknown is null with a reason, and nothing is clamped."""

import pandas as pd
import pytest
from factory import make_experiment, make_memory, tables_of_runs

from dpprof.experiments.config.datasheets import H200
from dpprof.experiments.config.target import Target
from dpprof.experiments.records.step_costs import Compute
from dpprof.results.analysis.tables.records import find_peak, utilise

GPU = {"type": "cuda", "name": "NVIDIA H200"}


def compute(**fields) -> Compute:
    usual = make_memory({"parameters": 4})["compute"]
    return Compute.model_validate(usual | fields)


def tables_of(root, experiment, step_s, *, peak, **flops):
    """Build the tables of a step whose memory was recorded, with a peak from a data sheet."""
    flops |= {"peak_flops_per_s": float(peak), "peak_source": "a data sheet"}
    recorded = {"recorded": make_memory({"parameters": 4}, **flops)}
    runs = (experiment, "clean", {"step_s": (step_s,)}), (experiment, "memory", recorded)
    return tables_of_runs(root, *runs)


def test_mfu_by_hand() -> None:
    """1.3e9 parameters, 8 x 1,024 tokens in half a second on a peak of 989.4 TFLOP/s.

    6 x 1.3e9 x 8,192 = 6.38976e13 FLOPs; over 0.5 s that is 127.7952 TFLOP/s, and of the
    peak 12.9164 %.
    """
    mfu = utilise(6 * 1.3e9 * 8 * 1024, 0.5, 989.4e12)

    assert mfu == pytest.approx(0.129164, rel=1e-5)


def row_of(root, *runs, ceilings=None):
    """Return the costs of an experiment whose memory was recorded, and the tables."""
    recorded = {"recorded": make_memory({"parameters": 4})}
    experiment = runs[0][0] if runs else make_experiment()
    tables = tables_of_runs(root, *runs, (experiment, "memory", recorded), ceilings=ceilings)
    [row] = tables["costs"].to_dict("records")
    return row


def test_above_one_is_kept_and_flagged(tmp_path) -> None:
    """A clamp would hide that the peak, the time or a FLOP is wrong."""
    tables = tables_of(
        tmp_path, make_experiment(), 2.0, model_flops=300, executed_flops=500, peak=100
    )
    (row,) = tables["costs"].to_dict("records")

    assert (row["mfu"], row["hfu"]) == (1.5, 2.5)
    assert row["beyond_peak"] is True
    (finding,) = tables["findings"].query("kind == 'beyond-peak'")["finding"]
    assert "MFU is 1.50" in finding
    assert "a data sheet" in finding


def test_a_gpu_that_is_in_no_table_has_no_peak() -> None:
    peak = find_peak(compute(), "bfloat16", {"type": "cuda", "name": "NVIDIA B9000"}, [])

    assert peak == (None, None, "dpprof has no data sheet of NVIDIA B9000")


def test_a_cpu_nobody_measured_has_no_peak(tmp_path) -> None:
    row = row_of(tmp_path, (make_experiment(), "clean", {"step_s": (2.0,)}))

    assert pd.isna(row["mfu"])
    assert pd.isna(row["hfu"])
    assert "were not measured" in row["utilisation_reason"]


def test_without_a_clean_run_there_is_no_time(tmp_path) -> None:
    assert row_of(tmp_path)["utilisation_reason"] == "no clean run measured the step time there"


def test_the_peak_is_of_the_dtype_in_use() -> None:
    """A float32 step against the tensor cores' bfloat16 peak would seem 15 times worse."""
    assert isinstance(H200, Target)
    for dtype, tflops in (("float32", 67), ("tf32", 494.7), ("bfloat16", 989.4)):
        recorded = compute(peak_flops_per_s=H200.flops_per_s[dtype], peak_source=H200.source)
        peak = find_peak(recorded, dtype, GPU, [])

        assert peak.flops_per_s == tflops * 1e12
        assert "without sparsity" in str(peak.source)


def test_a_prediction_made_on_a_cpu_lends_a_gpu_no_peak(tmp_path) -> None:
    """Predictions of a GPU's experiment run on the CPU, whose ceilings are not the GPU's."""
    experiment = make_experiment(device="cuda")
    device = {"device": {"type": "cuda", "name": "NVIDIA B9000"}}
    runs = (experiment, "capacity", {}), (experiment, "clean", device)
    row = row_of(tmp_path, *runs, ceilings={})

    assert pd.isna(row["mfu"])
    assert pd.isna(row["peak_flops_per_s"])
    assert row["utilisation_reason"] == "dpprof has no data sheet of NVIDIA B9000"
