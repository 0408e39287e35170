import pytest
from factory import (
    CPU,
    make_experiment,
    make_manifest,
    make_memory,
    tables_of_runs,
    write_synthetic,
)

from dpprof.analysis.collection import collect
from dpprof.analysis.tables.build import build_tables
from dpprof.analysis.tables.findings import _contended
from dpprof.records.result import Time

GHOST = make_experiment(method="opacus-ghost")


def findings(root, experiment=GHOST, *, replicates: int = 1):
    runs = [(experiment, number) for number in range(replicates)]
    manifest = make_manifest(*runs, instrument="phases")
    return build_tables(collect(manifest, root, partial=False))["findings"]


def write(root, experiment=GHOST, **fields) -> None:
    write_synthetic(root, experiment, instrument="phases", **fields)


def test_peaks_that_differ_between_processes_are_a_finding(tmp_path) -> None:
    for number, peak in enumerate([1_000, 1_000, 1_001]):
        write(tmp_path, replicate=number, peak_allocated_bytes=peak)
    table = findings(tmp_path, replicates=3)

    assert table.to_dict("records") == [
        {
            "kind": "peaks-differ",
            "experiment_id": GHOST.id,
            "instrument": "phases",
            "finding": "peak_allocated_bytes differs between processes: "
            "r0 1,000, r1 1,000, r2 1,001",
        }
    ]


def test_equal_peaks_and_failed_or_unknown_ones_are_none(tmp_path) -> None:
    write(tmp_path, replicate=0, peak_allocated_bytes=1_000)
    write(tmp_path, replicate=1, peak_allocated_bytes=1_000)
    write(tmp_path, replicate=2, peak_allocated_bytes=None)
    write(tmp_path, replicate=3, outcome="oom")

    assert findings(tmp_path, replicates=4).empty


def test_resident_memory_may_differ(tmp_path) -> None:
    for number in range(2):
        write(tmp_path, replicate=number, peak_rss_bytes=1_000 + number)

    assert findings(tmp_path, replicates=2).empty


def test_samples_that_were_not_finite_are_a_finding(tmp_path) -> None:
    for number, left_out in enumerate([0, 2, None]):
        write(tmp_path, replicate=number, nonfinite_samples=left_out)
    table = findings(tmp_path, replicates=3)

    assert table["kind"].tolist() == ["nonfinite-samples"]
    assert table["finding"][0].startswith("2 samples were left out because their loss or gradient")


def test_a_fallback_inside_ghost_is_a_finding(tmp_path) -> None:
    write(tmp_path, samplers={"Linear": "norm sampler", "Scale": "functorch, grad sampler"})

    found = findings(tmp_path)
    assert found["kind"].tolist() == ["fallback"]
    assert found["finding"].tolist() == ["Opacus fell back to functorch for Scale"]


def test_functorch_where_it_was_asked_for_is_none(tmp_path) -> None:
    functorch = make_experiment(method="opacus-functorch")
    write(tmp_path, functorch, samplers={"Linear": "functorch"})

    assert findings(tmp_path, functorch).empty


def test_cores_that_others_kept_busy_are_a_finding(tmp_path) -> None:
    """Of the synthetic machine's four cores the run computes on two."""
    for number, others in enumerate([0.1, 2.2, 3.0]):
        write(tmp_path, replicate=number, others_busy_cores=others)

    found = findings(tmp_path, replicates=3)
    assert found["kind"].tolist() == ["contended"]
    assert "(3.0 in r2)" in found["finding"][0]


def test_busy_cores_do_not_matter_to_a_predicted_time(tmp_path) -> None:
    timed = write_synthetic(tmp_path, GHOST, others_busy_cores=3.0)
    predicted = timed.model_copy(update={"time": Time(step_s=[])})

    assert [len(list(_contended([one]))) for one in (timed, predicted)] == [1, 0]


def test_a_replicate_of_another_gpu_is_a_finding(tmp_path) -> None:
    for number, name in enumerate(["NVIDIA H100", "NVIDIA H100", "NVIDIA A100"]):
        write(tmp_path, replicate=number, device={"type": "cuda", "name": name})
    found = findings(tmp_path, replicates=3)

    assert found["kind"].tolist() == ["devices-differ"]
    assert found["finding"][0] == (
        "it was measured r2 on NVIDIA A100, and most of the sweep on NVIDIA H100: its times and "
        "peaks do not count"
    )


def test_another_setting_of_the_allocator_is_a_finding(tmp_path) -> None:
    """In whichever experiment of the sweep; threads and visible devices are told otherwise."""
    for number in range(3):
        settings = {"OMP_NUM_THREADS": str(number)}
        settings |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if number == 2 else {}
        write(tmp_path, replicate=number, provenance={"settings": settings})
    found = findings(tmp_path, replicates=3)

    assert found["kind"].tolist() == ["settings-differ"]
    assert found["finding"][0] == (
        "it was measured r2 with PYTORCH_ALLOC_CONF expandable_segments:True instead of none, as "
        "most of the sweep was: compare it with care"
    )


def test_libraries_that_built_the_models_of_some_experiments_are_none(tmp_path) -> None:
    models = [GHOST, make_experiment(method="opacus-ghost", model="hf:tiny-llama")]
    for one in models:
        packages = {"torch": "0"} | ({"transformers": "5"} if one is not GHOST else {})
        write(tmp_path, one, provenance={"packages": packages})
    manifest = make_manifest(*((one, 0) for one in models), instrument="phases")

    assert build_tables(collect(manifest, tmp_path, partial=False))["findings"].empty


OTHERS = [{"name": "another cpu"}, {"cores": 64}, {"threads": 1}]


@pytest.mark.parametrize("other", OTHERS)
def test_replicates_of_two_machines_have_no_common_median(tmp_path, other) -> None:
    seconds = {0: 1.0, 1: 3.0, 2: 90.0}
    for number, step_s in seconds.items():
        device = CPU | other if number == 2 else CPU
        write_synthetic(tmp_path, GHOST, replicate=number, step_s=(step_s,), device=device)
    manifest = make_manifest(*((GHOST, number) for number in seconds))
    tables = build_tables(collect(manifest, tmp_path, partial=False))

    assert tables["experiments"]["median_step_s"].tolist() == [2.0]
    assert tables["experiments"]["processes"].tolist() == [2]
    assert tables["findings"]["kind"].tolist() == ["devices-differ"]


def test_a_method_of_another_machine_is_compared_with_nothing(tmp_path) -> None:
    here, there = make_experiment(method="standard"), make_experiment(method="flash")
    for number in range(2):
        write_synthetic(tmp_path, here, replicate=number)
    write_synthetic(tmp_path, there, step_s=(5.0,), device=CPU | {"name": "another cpu"})
    manifest = make_manifest((here, 0), (here, 1), (there, 0))
    rows = build_tables(collect(manifest, tmp_path, partial=False))["experiments"]

    assert rows.set_index("method")["step_ratio"].isna().tolist() == [False, True]


def test_predictions_made_on_unlike_machines_are_none(tmp_path) -> None:
    for number in range(2):
        device = {"type": "cpu", "name": f"cpu {number}", "cores": 2}
        fields = {"replicate": number, "device": device, "recorded": make_memory({"parameters": 1})}
        write_synthetic(tmp_path, GHOST, instrument="estimate", **fields)
    manifest = make_manifest((GHOST, 0), (GHOST, 1), instrument="estimate")

    assert build_tables(collect(manifest, tmp_path, partial=False))["findings"].empty


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"memory_bytes": 3 * 2**30, "load": 0.0}, "3.0 GiB, busy 0% at r0"),
        ({"memory_bytes": 0, "load": 0.5}, "0.0 GiB, busy 50% at r0"),
        ({"memory_bytes": 2**28, "load": 0.01}, None),
        ({"reason": "NVML is not available"}, None),
    ],
)
def test_others_on_the_gpu_are_a_finding(tmp_path, others, told) -> None:
    write(tmp_path, others_after=others)
    found = findings(tmp_path)

    assert found["kind"].tolist() == ([] if told is None else ["gpu-shared"])
    assert told is None or told in found["finding"][0]


@pytest.mark.parametrize(
    ("recorded", "told"),
    [(9 * 2**20, "1,048,576 bytes more"), (11 * 2**20, "1,048,576 bytes less")],
)
def test_memory_that_is_not_reconciled_is_a_finding(recorded, told, tmp_path) -> None:
    tables = tables_of_runs(
        tmp_path,
        (GHOST, "phases", {"peak_allocated_bytes": 10 * 2**20}),
        (GHOST, "memory", {"recorded": make_memory({"parameters": recorded})}),
        (GHOST, "estimate", {"recorded": make_memory({"parameters": 10 * 2**20 + 65_536})}),
    )

    assert tables["findings"].to_dict("records") == [
        {
            "kind": "memory-unreconciled",
            "experiment_id": GHOST.id,
            "instrument": "memory",
            "finding": f"the allocator's peak is {told} than recorded, beyond the bound of 65,536",
        }
    ]


def test_memory_of_another_batch_than_the_experiments_is_no_finding(tmp_path) -> None:
    tables = tables_of_runs(
        tmp_path,
        (GHOST, "phases", {"peak_allocated_bytes": 10 * 2**20}),
        (GHOST, "capacity", {"recorded": make_memory({"parameters": 20 * 2**20})}),
    )

    assert tables["findings"].empty


def test_memory_that_nothing_was_measured_to_compare_with_is_no_finding(tmp_path) -> None:
    run = (GHOST, "memory", {"recorded": make_memory({"parameters": 2**30})})

    assert tables_of_runs(tmp_path, run)["findings"].empty
