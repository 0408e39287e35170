"""A real trace of a small step: its times, its files, and who can read them."""

import gzip
import json
import sys
from functools import partial

import pytest
from factory import make_experiment
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from dpprof.experiments.config import registry
from dpprof.experiments.launch.worker_report import TRACES
from dpprof.experiments.records.result import Measurement
from dpprof.measure.instruments import kernels as kernels_module
from dpprof.measure.instruments.kernels import measure
from dpprof.measure.instruments.memory import measure as record_timelines
from dpprof.measure.traces.kernel_summary import state_kernels
from dpprof.measure.traces.trace_files import STEP, TRACE_NAME, find_steps, read_trace, write_trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces") / "of-a-run" / "r0"


@pytest.fixture(scope="module")
def ghost(folder) -> Measurement:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRACES, str(folder))
        experiment = make_experiment(method="opacus-ghost", timed_steps=2, batch_size=4)
        return measure(experiment, lambda _: None)


def test_times_add_up_to_the_step(ghost) -> None:
    kernels = ghost.kernels

    assert kernels.steps == 2
    assert sum(kernels.by_op_kind.values()) == pytest.approx(kernels.total_s)
    assert sum(one.seconds for one in kernels.by_phase_and_op_kind) == pytest.approx(
        kernels.total_s
    )
    assert ghost.observed.step_s == kernels.step_s
    assert ghost.observed.peak_rss_bytes > 50 * 2**20
    # On a CPU operators run one after another, so what they leave is idle.
    assert kernels.total_s + kernels.idle_s == pytest.approx(kernels.step_s)
    assert kernels.largest == sorted(kernels.largest, key=lambda k: k.seconds, reverse=True)


def test_phases_and_the_search_for_norms_are_separate(ghost) -> None:
    kernels = ghost.kernels

    assert set(kernels.by_phase) == {
        *("forward", "backward", "clip", "second_backward", "noise", "step"),
    }
    assert {"gemm", "norm", "optimizer", "random"} <= set(kernels.by_op_kind)
    norms = [one for one in kernels.by_phase_and_op_kind if one.op_kind == "norm"]
    assert {one.phase for one in norms} == {"backward", "clip"}
    assert {one.op_kind for one in kernels.by_phase_and_op_kind if one.phase == "step"} == {
        "optimizer"
    }


def test_recorded_operators_have_the_same_kinds(ghost) -> None:
    """Whatever takes time in a trace has its bytes in the timeline, under the same names."""
    experiment = make_experiment(method="opacus-ghost", timed_steps=2, batch_size=4)
    recorded = record_timelines(experiment, lambda _: None).io
    assert recorded is not None
    work = {(one.phase, one.op_kind): one.ops for one in recorded.by_phase_and_op_kind}

    for one in ghost.kernels.by_phase_and_op_kind:
        if one.op_kind not in ("copy", "clip"):  # a trace sees what Python numbers become
            assert work.get((one.phase, one.op_kind)), (one.phase, one.op_kind)
    assert recorded.launches == sum(work.values())
    assert sum(one.read for one in recorded.by_phase_and_op_kind) == recorded.bytes_read
    assert sum(one.written for one in recorded.by_phase_and_op_kind) == recorded.bytes_written


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name == "flash-bk" else pytest.mark.slow)
        for name in registry.names("methods")
    ],
)
def test_next_to_nothing_has_no_known_kind(method) -> None:
    experiment = make_experiment(
        method=method, model="tiny", seq_len=32, timed_steps=1, noise_multiplier=0.1
    )

    assert measure(experiment, lambda _: None).kernels.other_share < 0.05


def test_reasons_for_every_null(ghost) -> None:
    kernels = ghost.kernels

    assert kernels.waiting_s is None
    assert {"kernels.waiting_s", "time", "throughput", "memory"} <= set(ghost.reasons)
    assert kernels.trace is not None
    assert "kernels.trace" not in ghost.reasons


@pytest.mark.parametrize(
    ("folder", "why"),
    [("", "no folder was given for it"), ("file/r0", "it could not be written: ")],
)
def test_a_folder_that_cannot_be_written_costs_the_trace_alone(
    folder, why, monkeypatch, tmp_path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(TRACES, str(tmp_path / folder) if folder else "")
    measured = measure(make_experiment(), lambda _: None)

    assert measured.kernels.trace is None
    assert measured.kernels.total_s > 0
    assert measured.reasons["kernels.trace"].startswith(why)


def test_without_tensorboard_its_events_alone_are_left_out(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    monkeypatch.setenv(TRACES, str(tmp_path))
    measured = measure(make_experiment(), lambda _: None)

    assert measured.kernels.trace is not None
    assert [path.name for path in tmp_path.iterdir()] == [TRACE_NAME]
    assert "pip install 'dpprof[monitor]'" in capsys.readouterr().err


def test_a_gpu_that_is_not_traced_has_no_kernel_times(monkeypatch, tmp_path) -> None:
    """The trace is a CPU's: of a GPU's work, too, the host is all that it shows without CUPTI."""
    monkeypatch.setenv(TRACES, str(tmp_path))
    as_if = partial(state_kernels, on_cuda=True)
    monkeypatch.setattr(kernels_module, "state_kernels", lambda trace, **_: as_if(trace))
    measured = measure(make_experiment(), lambda _: None)

    assert measured.kernels is None
    assert measured.reasons["kernels"].startswith("the trace has no GPU kernel")
    assert measured.observed.step_s > 0
    assert (tmp_path / TRACE_NAME).is_file()


def test_perfetto_can_read_the_trace(ghost, folder) -> None:
    packed = (folder / TRACE_NAME).read_bytes()
    document = json.loads(gzip.decompress(packed))

    assert ghost.kernels.trace_bytes == len(packed)
    # The parts of the Trace Event Format that Perfetto's and Chrome's importers go by.
    for event in document["traceEvents"]:
        assert event.keys() >= {"ph", "name", "pid", "tid", "ts"}
        assert event["ph"] in "XBEMsftinC"
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    names = {event["name"] for event in document["traceEvents"]}
    assert {STEP, "dpprof phase: second_backward", "dpprof norms"} <= names
    # Spans of a thread that cross without one holding the other cannot be drawn.
    spans = sorted(read_trace(document).host, key=lambda s: (s.thread, s.start_s, -s.end_s))
    ends: dict = {}
    for span in spans:
        stack = ends.setdefault(span.thread, [])
        while stack and stack[-1] <= span.start_s + 1e-9:
            stack.pop()
        assert not stack or span.end_s <= stack[-1] + 2e-6
        stack.append(span.end_s)


def test_tensorboards_own_reader_shows_the_run(ghost, folder) -> None:
    shown = EventMultiplexer().AddRunsFromDirectory(str(folder.parents[1]))
    shown.Reload()

    run = "of-a-run/r0"
    assert set(shown.Runs()) == {run}
    (step,) = shown.Scalars(run, "kernels_ms/step")
    (gemm,) = shown.Scalars(run, "kernels_ms/op_kind/gemm")
    assert step.value == pytest.approx(ghost.kernels.step_s * 1e3)
    assert gemm.value == pytest.approx(ghost.kernels.by_op_kind["gemm"] * 1e3)


def test_a_trace_that_is_too_large_is_cut_and_then_left_out(ghost, folder, tmp_path) -> None:
    document = json.loads(gzip.decompress((folder / TRACE_NAME).read_bytes()))
    whole = write_trace(tmp_path, document)
    assert whole is not None
    cut = write_trace(tmp_path, document, limit_bytes=whole.bytes - 1)
    assert cut is not None
    kept = json.loads(gzip.decompress((tmp_path / TRACE_NAME).read_bytes()))

    assert (whole.steps, cut.steps) == (2, 1)
    assert cut.bytes == (tmp_path / TRACE_NAME).stat().st_size < whole.bytes
    assert len(find_steps(read_trace(kept))) == 1
    assert write_trace(tmp_path, document, limit_bytes=100) is None
    assert not (tmp_path / TRACE_NAME).exists()


@pytest.mark.gpu
def test_on_cuda_kernels_are_traced_with_their_launches() -> None:
    experiment = make_experiment(method="opacus-ghost", device="cuda", timed_steps=2, batch_size=4)
    kernels = measure(experiment, lambda _: None).kernels

    assert kernels.waiting_s is not None
    assert kernels.waiting_s <= kernels.idle_s
    assert set(kernels.by_phase) >= {"forward", "backward", "second_backward", "step"}
    assert {"gemm", "norm", "optimizer"} <= set(kernels.by_op_kind)
    assert kernels.other_share < 0.05
    assert all(one.op is not None for one in kernels.largest)
