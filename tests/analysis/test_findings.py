"""What is a caveat, what it says, and what is none."""

import pytest
from factory import CPU, make_experiment, make_memory, tables_of_runs, write_synthetic

from dpprof.experiments.records.result import Time
from dpprof.results.analysis.tables.findings import _tell_busy_cores

GHOST = make_experiment(method="opacus-ghost")
FUNCTORCH = make_experiment(method="opacus-functorch")
LLAMA = make_experiment(method="opacus-ghost", model="hf:tiny-llama")
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
PREDICTED = {"recorded": make_memory({"parameters": 1})}


def gpu(name):
    return {"device": {"type": "cuda", "name": name}}


def settings(number, **others):
    return {"provenance": {"settings": {"OMP_NUM_THREADS": str(number)} | others}}


def find(root, *replicates, experiment=GHOST, instrument="phases"):
    """Return the findings of an experiment, given what is special in each replicate."""
    runs = [
        (experiment, instrument, {"replicate": number} | fields)
        for number, fields in enumerate(replicates)
    ]
    return tables_of_runs(root, *runs)["findings"]


FOUND = {
    "peaks-differ": (
        [{"peak_allocated_bytes": peak} for peak in (1_000, 1_000, 1_001)],
        "peak_allocated_bytes differs between processes: r0 1,000, r1 1,000, r2 1,001",
    ),
    "nonfinite-samples": (
        [{"nonfinite_samples": left_out} for left_out in (0, 2, None)],
        "2 samples were left out because their loss or gradient was not finite",
    ),
    "fallback": (
        [{"samplers": {"Linear": "norm sampler", "Scale": "functorch, grad sampler"}}],
        "Opacus fell back to functorch for Scale",
    ),
    # Of the synthetic machine's four cores the run computes on two.
    "contended": (
        [{"others_busy_cores": others} for others in (0.1, 2.2, 3.0)],
        "other processes kept cores busy (3.0 in r2), so its times are too long",
    ),
    "devices-differ": (
        [gpu("NVIDIA H100"), gpu("NVIDIA H100"), gpu("NVIDIA A100")],
        (
            "it was measured r2 on NVIDIA A100, and most of the sweep on NVIDIA H100: its times "
            "and peaks do not count"
        ),
    ),
    # In whichever experiment of the sweep; threads and visible devices count otherwise.
    "settings-differ": (
        [settings(0), settings(1), settings(2, **EXPANDABLE)],
        (
            "it was measured r2 with PYTORCH_ALLOC_CONF expandable_segments:True instead of none, "
            "as most of the sweep was: compare it with care"
        ),
    ),
    "gpu-shared": (
        [{"others_after": {"memory_bytes": 3 * 2**30, "load": 0.0}}],
        "other processes used the GPU (3.0 GiB, busy 0% at r0), so its times may be too long",
    ),
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_caveat_is_one_row_in_a_sentence(kind, tmp_path) -> None:
    replicates, sentence = FOUND[kind]

    assert find(tmp_path, *replicates).to_dict("records") == [
        {"kind": kind, "experiment_id": GHOST.id, "instrument": "phases", "finding": sentence}
    ]


def test_load_of_others_on_the_gpu_counts_without_their_memory(tmp_path) -> None:
    [finding] = find(tmp_path, {"others_after": {"memory_bytes": 0, "load": 0.5}})["finding"]

    assert "0.0 GiB, busy 50% at r0" in finding


NONE = {
    "equal, failed and unknown peaks": [
        *({"peak_allocated_bytes": peak} for peak in (1_000, 1_000, None)),
        {"outcome": "oom"},
    ],
    "resident memory that differs": [{"peak_rss_bytes": 1_000 + number} for number in range(2)],
    "a little memory of others on the GPU": [
        {"others_after": {"memory_bytes": 2**28, "load": 0.01}}
    ],
    "a GPU that nothing can be said of": [{"others_after": {"reason": "NVML is not available"}}],
}


@pytest.mark.parametrize("case", NONE)
def test_what_is_no_caveat(case, tmp_path) -> None:
    assert find(tmp_path, *NONE[case]).empty


def test_functorch_where_it_was_asked_for_is_none(tmp_path) -> None:
    assert find(tmp_path, {"samplers": {"Linear": "functorch"}}, experiment=FUNCTORCH).empty


def test_predictions_made_on_unlike_machines_are_none(tmp_path) -> None:
    devices = [{"type": "cpu", "name": f"cpu {number}", "cores": 2} for number in range(2)]
    runs = [PREDICTED | {"device": device} for device in devices]

    assert find(tmp_path, *runs, instrument="estimate").empty


def test_libraries_that_built_the_models_of_some_experiments_are_none(tmp_path) -> None:
    built = {"torch": "0", "transformers": "5"}
    runs = [
        (one, "phases", {"provenance": {"packages": packages}})
        for one, packages in ((GHOST, {"torch": "0"}), (LLAMA, built))
    ]

    assert tables_of_runs(tmp_path, *runs)["findings"].empty


def test_busy_cores_do_not_matter_to_a_predicted_time(tmp_path) -> None:
    timed = write_synthetic(tmp_path, GHOST, others_busy_cores=3.0)
    predicted = timed.model_copy(update={"time": Time(step_s=[])})

    assert [_tell_busy_cores(run) for run in (timed, predicted)] == ["3.0 in r0", ""]


@pytest.mark.parametrize("other", [{"name": "another cpu"}, {"cores": 64}, {"threads": 1}])
def test_replicates_of_two_machines_have_no_common_median(tmp_path, other) -> None:
    runs = [
        (GHOST, "clean", {"replicate": number, "step_s": (step_s,), "device": device})
        for number, step_s, device in ((0, 1.0, CPU), (1, 3.0, CPU), (2, 90.0, CPU | other))
    ]
    tables = tables_of_runs(tmp_path, *runs)

    assert tables["experiments"]["median_step_s"].tolist() == [2.0]
    assert tables["experiments"]["processes"].tolist() == [2]
    assert tables["findings"]["kind"].tolist() == ["devices-differ"]


def test_a_method_of_another_machine_is_compared_with_nothing(tmp_path) -> None:
    here, there = make_experiment(method="standard"), make_experiment(method="flash")
    elsewhere = {"step_s": (5.0,), "device": CPU | {"name": "another cpu"}}
    runs = [*((here, "clean", {"replicate": n}) for n in range(2)), (there, "clean", elsewhere)]
    rows = tables_of_runs(tmp_path, *runs)["experiments"]

    assert rows.set_index("method")["step_ratio"].isna().tolist() == [False, True]


@pytest.mark.parametrize(
    ("recorded", "sentence"),
    [(9 * 2**20, "1,048,576 bytes more"), (11 * 2**20, "1,048,576 bytes less")],
)
def test_memory_that_is_not_reconciled_is_a_finding(recorded, sentence, tmp_path) -> None:
    tables = tables_of_runs(
        tmp_path,
        (GHOST, "phases", {"peak_allocated_bytes": 10 * 2**20}),
        (GHOST, "memory", {"recorded": make_memory({"parameters": recorded})}),
        (GHOST, "estimate", {"recorded": make_memory({"parameters": 10 * 2**20 + 65_536})}),
    )
    finding = f"the allocator's peak is {sentence} than recorded, beyond the bound of 65,536"

    assert tables["findings"].to_dict("records") == [
        {"kind": "memory-unreconciled", "experiment_id": GHOST.id, "instrument": "memory"}
        | {"finding": finding}
    ]


@pytest.mark.parametrize(
    "others", [[("phases", {"peak_allocated_bytes": 10 * 2**20}), "capacity"], ["memory"]]
)
def test_memory_that_nothing_measured_is_comparable_with_is_no_finding(tmp_path, others) -> None:
    """Of another batch than the experiment's; and without any measurement."""
    recorded = {"recorded": make_memory({"parameters": 2**30})}
    runs = [(GHOST, *(one if isinstance(one, tuple) else (one, recorded))) for one in others]

    assert tables_of_runs(tmp_path, *runs)["findings"].empty
