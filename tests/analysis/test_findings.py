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


def of_phases(*replicates):
    """Return runs of an experiment, given what is special in each replicate."""
    return [
        (GHOST, "phases", {"replicate": number} | fields)
        for number, fields in enumerate(replicates)
    ]


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

    assert tables_of_runs(tmp_path, *of_phases(*replicates))["findings"].to_dict("records") == [
        {"kind": kind, "experiment_id": GHOST.id, "instrument": "phases", "finding": sentence}
    ]


def test_load_of_others_on_the_gpu_counts_without_their_memory(tmp_path) -> None:
    [run] = of_phases({"others_after": {"memory_bytes": 0, "load": 0.5}})
    [finding] = tables_of_runs(tmp_path, run)["findings"]["finding"]

    assert "0.0 GiB, busy 50% at r0" in finding


LARGE = {"recorded": make_memory({"parameters": 2**30})}
NONE = {
    "equal, failed and unknown peaks": of_phases(
        *({"peak_allocated_bytes": peak} for peak in (1_000, 1_000, None)), {"outcome": "oom"}
    ),
    "resident memory that differs": of_phases({"peak_rss_bytes": 1_000}, {"peak_rss_bytes": 1_001}),
    "a little memory of others on the GPU": of_phases(
        {"others_after": {"memory_bytes": 2**28, "load": 0.01}}
    ),
    "a GPU that nothing can be said of": of_phases(
        {"others_after": {"reason": "NVML is not available"}}
    ),
    "functorch where it was asked for": [
        (FUNCTORCH, "phases", {"samplers": {"Linear": "functorch"}})
    ],
    "predictions made on unlike machines": [
        (GHOST, "estimate", PREDICTED | {"replicate": number, "device": CPU | {"name": name}})
        for number, name in enumerate("ab")
    ],
    "libraries that built the models of some experiments": [
        (one, "phases", {"provenance": {"packages": packages}})
        for one, packages in ((GHOST, {"torch": "0"}), (LLAMA, {"torch": "0", "transformers": "5"}))
    ],
    "memory of another batch than the one that was measured": [
        (GHOST, "phases", {"peak_allocated_bytes": 10 * 2**20}),
        (GHOST, "capacity", LARGE),
    ],
    "memory that nothing measured": [(GHOST, "memory", LARGE)],
}


@pytest.mark.parametrize("case", NONE)
def test_what_is_no_caveat(case, tmp_path) -> None:
    assert tables_of_runs(tmp_path, *NONE[case])["findings"].empty


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
