"""The times of phases, and bytes by component: equal between processes, and summing to the peak."""

import functools
import gc
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

import pytest
from factory import make_experiment

from dpprof.experiments.config import registry
from dpprof.measure.devices.cpu import CpuRecorder
from dpprof.measure.instruments.opening import open_experiment
from dpprof.predict.memory.cpu_workspaces import CPU_WORKSPACES
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.tracing import TimelineRecorder
from dpprof.subjects.setup import set_up

P, B = 1176, 3
FIELDS = {"batch_size": B, "seq_len": 4, "noise_multiplier": 0.1}


def measure_here(method: str, instrument: str = "phases") -> dict:
    gc.collect()  # a recording sees the release of what is older than it
    experiment = make_experiment(method=method, warmup_steps=2, timed_steps=3, **FIELDS)
    measured = registry.load("instruments", instrument)(experiment, lambda _: None)
    return json.loads(measured.model_dump_json())


measured = functools.cache(measure_here)


def methods(*default: str) -> list:
    """All methods; all but some are slow."""
    return [
        pytest.param(name, marks=() if name in default else pytest.mark.slow)
        for name in registry.names("methods")
    ]


@pytest.fixture(scope="module")
def processes():
    """Processes for one call each, which have imported the libraries and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["opacus", "torch._dynamo", "dpprof.measure.instruments.memory", "pytest"]
    )
    with ProcessPoolExecutor(mp_context=context, max_tasks_per_child=1) as pool:
        yield pool


def peaks_here(method: str, *, with_books: bool) -> tuple[list[int], int | None]:
    """Peaks of the first and a later step, which nothing counts, and what was recorded of it."""
    experiment = make_experiment(method=method, **FIELDS)
    kind, device = open_experiment(experiment)
    allocator, recorded = CpuRecorder(), None
    recorder = Recorder(is_there=lambda tensor, _: not tensor.is_meta, workspaces=CPU_WORKSPACES)
    with recorder if with_books else nullcontext():
        training = set_up(experiment, kind, device.torch_device, lambda *_: None)
        timeline_recorder = TimelineRecorder(recorder, training.step, lambda _: None)
        for name in ("first", "between", "steady"):
            with allocator.window(name):
                if with_books:
                    recorded = timeline_recorder.run(training.batch, counting=True)
                else:
                    training.step.run(training.batch, lambda _: None)
    peaks = allocator.close().peaks
    steps = [peaks[name].allocated_bytes for name in ("first", "steady")]
    return steps, recorded and recorded.peak_bytes


SCALARS = 8
"""The tensor that PyTorch makes of a Python number once more under a dispatch mode."""


@pytest.mark.parametrize("method", methods("opacus-ghost"))
def test_peaks_are_equal_in_all_processes_and_neither_census_nor_recording_changes_them(
    method, processes
) -> None:
    with_census = processes.map(measure_here, [method] * 2)
    calls = [
        processes.submit(peaks_here, method, with_books=recorded) for recorded in (False, True)
    ]
    (plain, _), (watched, of_books) = (call.result() for call in calls)
    figures = ("first_step_peak_allocated_bytes", "peak_allocated_bytes")

    assert [[one["memory"][name] for name in figures] for one in with_census] == [plain] * 2
    assert min(plain) > 4 * P * 4
    for bare, with_ledger in zip(plain, watched, strict=True):
        assert 0 <= with_ledger - bare <= SCALARS
    assert of_books == plain[1]


@pytest.mark.parametrize("method", methods("standard", "opacus-ghost"))
def test_components_and_what_nobody_claims_sum_to_what_is_allocated(method) -> None:
    snapshots = measured(method)["memory"]["snapshots"]

    for snapshot in snapshots:
        assert sum(snapshot["components"].values()) == snapshot["allocated_bytes"]
        assert snapshot["components"]["unattributed"] >= 0
        assert snapshot["allocated_bytes"] <= measured(method)["memory"]["peak_allocated_bytes"]


def test_a_standard_step_is_accounted_for_to_the_byte() -> None:
    """Beside the forward pass, where autograd keeps activations, nothing is unattributed."""
    snapshots = {s["name"]: s["components"] for s in measured("standard")["memory"]["snapshots"]}

    assert snapshots["model_loaded"]["parameters"] == P * 4
    assert snapshots["after_step"]["optimizer_state"] == 2 * P * 4 + 17 * 4
    assert snapshots["after_backward"]["gradients"] == P * 4
    assert snapshots["after_forward"].pop("unattributed") > 0
    for name, components in snapshots.items():
        assert components.get("unattributed", 0) <= 4, name  # the loss


@pytest.mark.parametrize(
    ("method", "clipping"),
    [("opacus-ghost", ["clip", "second_backward"]), ("microbatch", ["clip"])],
)
def test_phases_are_those_of_the_method_and_sum_to_the_step(method, clipping) -> None:
    """Also those that are entered for every sample."""
    time = measured(method)["time"]

    assert list(time["phases_s"]) == ["forward", "backward", *clipping, "noise", "step"]
    for samples in time["phases_s"].values():
        assert len(samples) == len(time["step_s"]) == 3
        assert min(samples) > 0
    for step_s, *parts in zip(time["step_s"], *time["phases_s"].values(), strict=True):
        assert sum(parts) == pytest.approx(step_s)


MOMENTS = ["model_loaded", "wrapped_with_dp", "optimizer_created", "after_warmup"]
MOMENTS += ["before_forward", "after_forward", "after_backward", "after_step"]


@pytest.mark.parametrize("instrument", ["clean", "phases"])
@pytest.mark.parametrize("method", ["standard", "opacus-ghost"])
def test_both_instruments_take_snapshots_name_samplers_and_say_why_a_figure_is_null(
    method, instrument
) -> None:
    result = measured(method, instrument=instrument)
    memory, time = result["memory"], result["time"]
    elsewhere = {"at_peak", "timeline", "attribution", "allocator", "predicted_step_s"}
    if instrument == "clean":
        elsewhere.add("phases_s")
    nulls = {
        f"{part}.{name}"
        for part, figures in (("memory", memory), ("time", time))
        for name, value in figures.items()
        if value is None and name not in elsewhere
    }
    if any(snapshot["rss_bytes"] is None for snapshot in memory["snapshots"]):
        nulls.add("memory.snapshots.rss_bytes")
    second_pass = ["after_second_backward"] if method == "opacus-ghost" else []
    elapsed = [snapshot["elapsed_s"] for snapshot in memory["snapshots"]]

    assert [one["name"] for one in memory["snapshots"]] == MOMENTS[:-1] + second_pass + MOMENTS[-1:]
    assert elapsed == sorted(elapsed)
    assert nulls
    assert nulls <= set(result["reasons"])
    assert (result["throughput"] is None) == ("throughput" in result["reasons"])
    assert (result["throughput"] is None) == (instrument == "phases")
    if method == "opacus-ghost":
        assert result["samplers"]["Linear"] == "norm sampler"
        assert "samplers" not in result["reasons"]
    else:
        assert result["samplers"] is None
        assert result["reasons"]["samplers"].startswith("the method asks no layer")


@pytest.mark.gpu
def test_on_cuda_peaks_are_the_allocators_and_phases_wait_for_the_device() -> None:
    from dpprof.measure.instruments.phases import measure  # noqa: PLC0415

    found = measure(make_experiment(method="opacus-hooks", device="cuda"), lambda _: None)
    after_backward = next(s for s in found.memory.snapshots if s.name == "after_backward")

    assert after_backward.components["per_sample_gradients"] == 2 * P * 4
    assert sum(after_backward.components.values()) == after_backward.allocated_bytes
    assert found.memory.peak_allocated_bytes >= after_backward.allocated_bytes
    assert set(found.time.phases_s) == {"forward", "backward", "clip", "noise", "step"}
