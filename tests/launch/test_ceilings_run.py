"""Whatever happens to the process that measures a device, there is one whole file."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from children import HERE, refuse
from factory import make_experiment
from scripts import call

from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.launch import ceilings_run
from dpprof.experiments.launch.device_lock import hold_one
from dpprof.experiments.records.ceilings import ceilings_path, device_name, read_ceilings
from dpprof.predict.estimate import estimate
from dpprof.system.hardware import describe_cpu

UNNAMED = "no experiment was named"


@pytest.fixture
def failing(monkeypatch):
    """Have a child fail in place of measuring."""
    monkeypatch.setattr(ceilings_run, "_MEASURE", "children:fail")
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def test_if_the_child_fails_nulls_have_the_reason(tmp_path, failing) -> None:
    ceilings_run.measure_apart("cpu", tmp_path / "x.json")
    ceilings = read_ceilings(tmp_path / "x.json")

    why = "the measurement's process ended with exit code 1 before it could answer"
    assert set(ceilings.reasons.values()) == {why, UNNAMED}
    assert [*ceilings.matmul.values(), ceilings.bandwidth] == [None] * 6
    assert device_name(ceilings.device) == device_name(describe_cpu(1))


def test_without_cuda_nothing_is_measured_and_the_reason_is_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ceilings_run, "why_no_cuda", lambda: "the NVIDIA driver shows no GPU")
    monkeypatch.setattr(ceilings_run, "gpu_slots", lambda _threads: [])
    ceilings = ceilings_run.measure_apart("cuda", tmp_path / "x.json", [tmp_path / "a.json"])

    operators = ceilings.reasons.pop("operators")
    assert (ceilings.operators, operators) == (None, "operators are timed on processors alone")
    assert set(ceilings.reasons.values()) == {"the NVIDIA driver shows no GPU"}
    assert (ceilings.device["type"], ceilings.device["name"]) == ("cuda", None)


def test_predictions_for_this_processor_rest_on_operators_that_were_timed_on_it(
    tmp_path, failing, monkeypatch
) -> None:
    monkeypatch.setattr(ceilings_run, "_TIME_OPERATORS", "children:time_operators")
    experiment = make_experiment()
    spec = tmp_path / f"{experiment.id}.json"
    spec.write_text(experiment.model_dump_json())
    output = ceilings_path(tmp_path, device_name(describe_cpu(1)))
    output.parent.mkdir(parents=True)
    # A busy machine takes more than the usual time, and would leave the experiment out.
    table = ceilings_run.measure_apart("cpu", output, [spec], 1200).operators
    monkeypatch.chdir(tmp_path)
    step = estimate(experiment, lambda _: None).time.predicted_step_s

    assert (table.experiments, table.left_out) == ([experiment.id], {})
    assert {"addmm", "mm", "native_layer_norm"} <= {one.op for one in table.operators}
    assert step.rests_on["measured at this shape"] == pytest.approx(1)
    assert 0 < step.low < step.median < step.high < 10


def test_it_waits_for_a_prediction_too(tmp_path, failing) -> None:
    with ThreadPoolExecutor() as pool:
        with hold_one([["cpu"]], refuse, shared=True):
            waits = pool.submit(ceilings_run.measure_apart, "cpu", tmp_path / "after.json")
            time.sleep(0.5)
            assert not (tmp_path / "after.json").exists()
        assert waits.result(timeout=60).bandwidth is None


def test_this_processor_is_measured_and_it_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ceilings_run, "_MEASURE", "children:measure_briefly")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    done = call("ceilings", "--device=cpu", "--output=x.json", cwd=tmp_path)
    ceilings = read_ceilings(tmp_path / "x.json")

    assert done.returncode == 0, done.stderr
    assert f"dpprof: ceilings of {device_name(describe_cpu(1))} after" in done.stderr
    assert "float32 " in done.stderr
    assert list(ceilings.reasons) == ["matmul.tf32", "operators"]
    assert ceilings.matmul["float32"].samples[0].size == 256
    assert len(ceilings.code_digest) == 64


@pytest.mark.gpu
def test_a_gpu_is_measured_and_no_faster_than_its_data_sheet(tmp_path) -> None:
    call("ceilings", "--device=cuda", "--output=x.json", cwd=tmp_path)
    ceilings = read_ceilings(tmp_path / "x.json")
    sheet = find_by_device_name(ceilings.device["name"])

    assert set(ceilings.reasons) <= {"matmul.tf32", "operators"}
    assert ceilings.matmul["bfloat16"].flops_per_s > ceilings.matmul["float32"].flops_per_s
    if sheet is not None:
        assert ceilings.matmul["bfloat16"].flops_per_s < sheet.flops_per_s["bfloat16"]
        assert ceilings.bandwidth.bytes_per_s < sheet.bandwidth_bytes_per_s
