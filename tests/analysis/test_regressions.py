"""What counts as a regression: times with their noise, failures, and what cannot be compared."""

from pathlib import Path

import numpy as np
import pytest
from factory import CPU, make_experiment, make_memory, make_predicted_time, write_synthetic

from dpprof.experiments.records.comparison import FolderComparison, Thresholds
from dpprof.results.analysis.gate.regressions import Options, compare_folders, read_results_folder
from dpprof.results.analysis.statistics import can_differ
from dpprof.results.analysis.statistics import compare as compare_processes

REAL_STEP_S = np.loadtxt(Path(__file__).parent / "aa_step_s.csv", skiprows=1)
EXPERIMENT = make_experiment(method="flash")
ON_H100 = make_experiment(device="cuda", target="h100")
SIDES = ("a", "b")


def compare(root: Path, sides=SIDES, **options) -> FolderComparison:
    return compare_folders(
        *(read_results_folder(root / side) for side in sides), Options(**options)
    )


def write_times(root: Path, medians, steps=20, **fields) -> None:
    """Write replicates whose steps scatter by 2 % around the median of their process."""
    draw = np.random.default_rng(len(medians))
    for replicate, seconds in enumerate(medians):
        step_s = tuple(seconds * np.exp(draw.normal(0, 0.02, steps)))
        write_synthetic(root, EXPERIMENT, replicate=replicate, step_s=step_s, **fields)


def write_memory(root: Path, a, b, experiment=EXPERIMENT, instrument="estimate") -> None:
    """Write a result with recorded memory on each side; the sides differ in these fields."""
    for side, fields in zip(SIDES, (a, b), strict=True):
        write_synthetic(root / side, experiment, instrument=instrument, **recorded() | fields)


def sized(size: int, **fields) -> dict:
    return {"recorded": make_memory({"noise": size})} | fields


def recorded(**others) -> dict:
    return {"recorded": make_memory({"noise": 1}) | others}


def noisy(count: int, seed: int, spread: float = 0.02) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, spread, count))


def test_15_percent_slower_in_10_replicates_of_20_steps_is_a_regression(tmp_path) -> None:
    write_times(tmp_path / "a", noisy(10, 0))
    write_times(tmp_path / "b", 1.15 * noisy(10, 1))
    found = compare(tmp_path, metrics=["time"])

    assert (found.verdict, found.exit_status) == ("regression", 1)
    (figure,) = found.figures
    assert (figure.figure, figure.experiment_id) == ("step time", EXPERIMENT.id)
    assert figure.ratio == pytest.approx(1.15, abs=0.03)
    known = figure.statistics
    assert (known.baseline_processes, known.candidate_processes) == (10, 10)
    assert 1.05 < known.ratio_low <= figure.ratio <= known.ratio_high
    assert 0 < known.noise_floor < 0.05
    assert known.p_value < 0.001


FAST, SLOW = noisy(10, 0), noisy(10, 1)
STEADY = noisy(10, 0, 0.001), 1.04 * noisy(10, 1, 0.001)
WILD = noisy(10, 0, 0.3)
TIMES = {
    "15 % faster": (1.15 * FAST, SLOW, {}, "nothing worse", ["better"]),
    "real times of equal experiments": (
        *(REAL_STEP_S[:10], REAL_STEP_S[10:20], {}, "nothing worse", []),
    ),
    "less than the threshold": (*STEADY, {}, "nothing worse", ["within threshold"]),
    "more than the threshold": (*STEADY, {"time": "3%"}, "regression", ["worse"]),
    "twice the threshold within the noise": (WILD, 1.1 * WILD, {}, "nothing worse", []),
    "three replicates": (
        *([1.0, 1.01, 1.02], [9.0, 9.01, 9.02], {}, "not comparable", ["undecided"]),
    ),
}


@pytest.mark.parametrize("case", TIMES)
def test_times_are_judged_with_their_noise(tmp_path, case) -> None:
    *sides, thresholds, verdict, judgements = TIMES[case]
    for side, medians in zip(SIDES, sides, strict=True):
        write_times(tmp_path / side, medians)
    found = compare(tmp_path, thresholds=Thresholds.model_validate(thresholds))

    assert (found.verdict, [one.judgement for one in found.figures]) == (verdict, judgements)
    if verdict == "not comparable":
        judged = "memory or flops or launches or time"
        assert found.reason == f"no run has enough on both sides to judge {judged}"
        reason = "not enough replicates: 3 and 3, and 4 on each side are enough"
        assert found.figures[0].reason == reason
    else:
        assert found.judged["time"] == 1


@pytest.mark.parametrize(("count", "enough"), [(3, False), (4, True)])
def test_enough_replicates_are_those_whose_p_value_can_reach_5_percent(count, enough) -> None:
    assert can_differ(count, count) is enough
    sides = range(1, count + 1), range(count + 1, 2 * count + 1)
    assert (compare_processes(*sides, None).p_value < 0.05) is enough


def test_predicted_times_for_a_gpu_are_compared_without_noise(tmp_path) -> None:
    sides = [recorded(time=make_predicted_time(seconds)) for seconds in (1.0, 1.06)]
    write_memory(tmp_path, *sides, experiment=ON_H100)
    found = compare(tmp_path)

    assert found.verdict == "regression"
    (figure,) = found.figures
    assert (figure.figure, figure.candidate) == ("predicted step time", 1.06)
    assert compare(tmp_path, metrics=["memory", "flops"]).verdict == "nothing worse"


@pytest.mark.parametrize("outcome", ["oom", "crashed"])
def test_a_run_that_fails_now_is_a_regression_and_the_reverse_is_better(tmp_path, outcome) -> None:
    write_times(tmp_path / "a", [1.0] * 4)
    write_times(tmp_path / "b", [1.0] * 3)
    write_synthetic(tmp_path / "b", EXPERIMENT, replicate=3, outcome=outcome, message="too much")
    found = compare(tmp_path)

    assert found.verdict == "regression"
    (figure,) = [one for one in found.figures if one.metric == "outcome"]
    assert (figure.baseline, figure.candidate) == ("ok", f"3 ok, 1 {outcome}")
    assert figure.reason == "too much"

    back = compare(tmp_path, sides=SIDES[::-1])
    assert [one.judgement for one in back.figures if one.metric == "outcome"] == ["better"]
    assert back.verdict == "nothing worse"


def test_what_failed_before_and_fails_now_is_no_regression(tmp_path) -> None:
    for side, outcome in zip(SIDES, ("oom", "crashed"), strict=True):
        write_synthetic(tmp_path / side, EXPERIMENT, outcome=outcome)
    write_memory(tmp_path, {}, {}, instrument="memory")
    found = compare(tmp_path)

    assert found.verdict == "nothing worse"
    (figure,) = found.figures
    reason = "failed on both sides, in different ways"
    assert (figure.judgement, figure.reason) == ("undecided", reason)


PROVENANCE = {
    "packages": {"torch": "2.12.0", "opacus": "1.6.0", "dpprof": "0.1.0"},
    "settings": {"LD_PRELOAD": "libjemalloc.so", "OMP_NUM_THREADS": "1"},
    "host": {"cores_logical": 4},
}


def with_packages(**versions: str) -> dict:
    return {"provenance": PROVENANCE | {"packages": PROVENANCE["packages"] | versions}}


def test_commits_between_releases_are_comparable(tmp_path) -> None:
    usual, later = (with_packages(dpprof=f"0.1.0{dev}") for dev in ("", ".dev3+g1a2b3c4"))
    write_memory(tmp_path, sized(100, **usual), sized(101, **later), instrument="memory")
    assert compare(tmp_path).verdict == "regression"


CPU_NAMES = ("synthetic cpu, 2 cores", "other cpu, 2 cores")
UNLIKE = {
    "device": ({"device": CPU | {"name": "other cpu"}}, "device", *CPU_NAMES),
    "threads": ({"device": CPU | {"threads": 1}}, "device", "2", "1"),
    "torch": (with_packages(torch="2.13.0"), "versions", "2.12.0", "2.13.0"),
    "opacus": (with_packages(opacus="1.6.1"), "versions", "1.6.0", "1.6.1"),
    "dpprof": (with_packages(dpprof="0.2.0"), "versions", "0.1.0", "0.2.0"),
    "LD_PRELOAD": (
        {"provenance": PROVENANCE | {"settings": {}}},
        *("settings", "libjemalloc.so", "none"),
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_makes_measured_runs_not_comparable_is_named_with_both_values(tmp_path, name) -> None:
    fields, kind, was, now = UNLIKE[name]
    usual = {"provenance": PROVENANCE}
    write_memory(tmp_path, sized(100, **usual), sized(101, **usual | fields), instrument="memory")
    found = compare(tmp_path)

    assert (found.verdict, found.exit_status) == ("not comparable", 2)
    (unlike,) = found.not_comparable
    assert (unlike.kind, unlike.name) == (kind, name)
    assert (unlike.baseline, unlike.candidate) == (was, now)
    assert unlike.experiment_ids == [EXPERIMENT.id]
    assert found.reason == (
        f"{name} {was} in the baseline and {now} in the candidate "
        f"(--across {kind} compares them all the same)"
    )
    assert found.figures == []
    assert compare(tmp_path, across=[kind]).verdict == "regression"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, []),
        ({"model": "hf:tiny-llama"}, ["transformers"]),
        ({"model": "hf:tiny-llama", "lora": "rank=2"}, ["transformers", "peft"]),
    ],
)
def test_libraries_that_built_a_model_must_be_of_one_version(tmp_path, fields, named) -> None:
    versions = (with_packages(transformers=version, peft=version) for version in "12")
    write_memory(tmp_path, *versions, experiment=make_experiment(**fields))
    found = compare(tmp_path)

    unlike = [(one.kind, one.name, one.baseline, one.candidate) for one in found.not_comparable]
    assert unlike == [("versions", name, "1", "2") for name in named]
    assert compare(tmp_path, across=["versions"]).verdict == "nothing worse"


def test_replicates_of_two_machines_are_not_comparable_even_where_both_sides_have_both(
    tmp_path,
) -> None:
    for side in SIDES:
        for replicate, name in enumerate("xy"):
            device = CPU | {"name": name}
            write_synthetic(tmp_path / side, EXPERIMENT, replicate=replicate, device=device)
    (unlike,) = compare(tmp_path).not_comparable

    assert unlike.baseline == unlike.candidate == "x, 2 cores or y, 2 cores"


def test_times_on_another_device_are_never_compared(tmp_path) -> None:
    write_times(tmp_path / "a", noisy(10, 0))
    write_times(tmp_path / "b", 2 * noisy(10, 1), device=CPU | {"name": "other cpu"})
    found = compare(tmp_path, across=["device"])

    assert found.verdict == "not comparable"
    (figure,) = found.figures
    assert figure.judgement == "undecided"
    assert figure.reason == "times on different devices are not compared"


def test_an_estimate_for_a_gpu_is_the_same_on_any_machine(tmp_path) -> None:
    other = {"device": CPU | {"name": "other", "threads": 9}}
    write_memory(tmp_path, {}, other, experiment=ON_H100)

    assert compare(tmp_path).verdict == "nothing worse"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prediction_for_the_machine_that_made_it_is_of_its_threads_or_its_gpu(
    tmp_path, device
) -> None:
    sides = [
        {
            "recorded": make_memory({"noise": 1}, peak_source=f"data sheet of {side}"),
            "device": CPU | {"threads": threads, "name": side},
        }
        for side, threads in zip(SIDES, (2, 4), strict=True)
    ]
    write_memory(tmp_path, *sides, experiment=make_experiment(device=device))
    (unlike,) = compare(tmp_path).not_comparable

    assert (unlike.name, unlike.baseline, unlike.candidate) == (
        ("threads", "2", "4") if device == "cpu" else ("GPU", "data sheet of a", "data sheet of b")
    )


def test_a_run_without_an_asked_figure_need_not_be_comparable(tmp_path) -> None:
    """Clean runs on a CPU tell nothing of memory that is exact."""
    for side, device in zip(SIDES, (CPU, CPU | {"name": "other"}), strict=True):
        write_synthetic(tmp_path / side, EXPERIMENT, device=device)
    write_memory(tmp_path, {}, {}, experiment=ON_H100)

    assert compare(tmp_path, metrics=["memory", "flops"]).verdict == "nothing worse"
    assert compare(tmp_path).verdict == "not comparable"


def test_a_regression_is_one_even_where_other_runs_are_not_comparable(tmp_path) -> None:
    write_memory(tmp_path, sized(1), sized(2), instrument="memory")
    other = make_experiment(method="microbatch")
    for side in SIDES:
        write_synthetic(tmp_path / side, other, device=CPU | {"name": side})
    found = compare(tmp_path)

    assert (found.verdict, found.exit_status) == ("regression", 1)
    assert [one.experiment_ids for one in found.not_comparable] == [[other.id]]


def write_peaks(root: Path, sizes) -> None:
    for replicate, size in enumerate(sizes):
        fields = {"replicate": replicate, "peak_allocated_bytes": size}
        write_synthetic(root, EXPERIMENT, instrument="phases", **fields)


def test_replicates_that_differ_are_worse_only_where_their_ranges_lie_apart(tmp_path) -> None:
    write_peaks(tmp_path / "a", [100, 110])
    write_peaks(tmp_path / "b", [105, 120])

    (figure,) = compare(tmp_path, metrics=["memory"]).figures
    assert figure.judgement == "undecided"
    assert figure.reason == "replicates differ: 100 to 110 and 105 to 120"

    write_peaks(tmp_path / "b", [111, 112])
    assert compare(tmp_path, metrics=["memory"]).figures[0].judgement == "worse"


def test_components_say_where_the_peak_moved_to(tmp_path) -> None:
    peaks = (("backward", {"noise": 10}), ("step", {"workspace": 9}))
    sides = [{"recorded": make_memory(sizes, phase=phase)} for phase, sizes in peaks]
    write_memory(tmp_path, *sides, instrument="memory")
    found = compare(tmp_path, metrics=["memory"])
    judged = {one.part or one.figure: one for one in found.figures}

    assert {name: one.judgement for name, one in judged.items()} == {
        "peak": "better",
        "peak of the first step": "better",
        "noise": "better",
        "workspace": "worse",
    }
    assert judged["workspace"].reason == "the peak is in step, and was in backward"


def test_a_byte_more_that_ranks_send_is_a_regression_of_its_collective(tmp_path) -> None:
    experiment = make_experiment(method="flash", parallel="kind=fsdp,world_size=2")
    sent = {"collective": "all-gather", "phase": "clip", "calls": 1, "payload_bytes": 16}
    sides = [recorded(communication=[sent | {"bytes_each_way": size}]) for size in (8, 9)]
    write_memory(tmp_path, *sides, experiment=experiment)
    (figure,) = compare(tmp_path, metrics=["flops"]).figures

    told = (figure.figure, figure.part, figure.phase, figure.judgement)
    assert told == ("bytes sent", "all-gather", "clip", "worse")


def test_one_more_launch_is_a_regression_beyond_its_threshold(tmp_path) -> None:
    usual = make_memory({"noise": 1})["io"]
    write_memory(tmp_path, *(recorded(io=usual | {"launches": count}) for count in (100, 101)))
    judged = [
        compare(tmp_path, metrics=["launches"], thresholds=Thresholds(launches=share)).figures
        for share in ("0.5%", "1%")
    ]

    assert [(one.figure, one.ratio, one.judgement) for (one,) in judged] == [
        ("launches", 1.01, "worse"),
        ("launches", 1.01, "within threshold"),
    ]


def test_a_figure_that_one_side_lacks_is_not_decided(tmp_path) -> None:
    write_memory(tmp_path, {}, recorded(compute=None), instrument="memory")
    found = compare(tmp_path)

    assert found.verdict == "nothing worse"
    assert {(one.figure, one.baseline, one.candidate, one.reason) for one in found.figures} == {
        ("executed FLOPs", 100, None, "known in the baseline alone"),
        ("other FLOPs", 7, None, "known in the baseline alone"),
        ("model FLOPs", 50, None, "known in the baseline alone"),
    }
