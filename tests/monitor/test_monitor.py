"""Metrics of a training loop against numbers worked out by hand, on a clock moved by hand."""

import sys
from contextlib import nullcontext

import pytest
import torch
from documents import find_code
from factory import make_experiment
from snapshots import assert_sentences, refusals_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import H200
from dpprof.measure.monitor import Monitor, TensorBoard, WeightsAndBiases
from dpprof.measure.monitor.monitor import find_datasheet_peak
from dpprof.subjects.setup import set_up

PROFILED_S, LOADING_S = 100.0, 0.5


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.rows = []
        self.closed = 0

    def __call__(self, step, values) -> None:
        self.rows.append((step, values))

    def close(self) -> None:
        self.closed += 1


def multiply() -> None:
    """Execute 2 x 2 x 3 x 5 = 60 FLOPs."""
    torch.ones(2, 3) @ torch.ones(3, 5)


def train(monitor, clock, seconds, *, batches=None, loading_s=LOADING_S, act=multiply) -> None:
    """Take steps that last so many seconds each, after a while of loading data."""
    for own_s, (samples, tokens) in zip(seconds, batches or [(1, 6)] * len(seconds), strict=True):
        clock.now_s += loading_s
        with monitor.step(samples=samples, tokens=tokens):
            act()
            clock.now_s += own_s


def watch(freq=4, **arguments) -> tuple[Monitor, Clock, Kept]:
    clock, kept = Clock(), Kept()
    usual = {"model_flops_per_token": 100.0, "peak_flops_per_s": 1000.0, "sinks": [kept]}
    return Monitor(flops_profile_freq=freq, clock=clock, **usual | arguments), clock, kept


# Steps 1 to 3 last 1 + 2 + 3 s, and data are loaded four times before step 4 begins: 8 s in all,
# in which a Poisson sampler drew 1, 0 and 3 samples of ten tokens. The profiled step has 6 tokens.
SECONDS = (PROFILED_S, 1.0, 2.0, 3.0, PROFILED_S)
BATCHES = ((9, 90), (1, 10), (0, 0), (3, 30), (2, 6))
BY_HAND = {
    "perf/step_time": 8 / 3,
    "perf/steps_per_second": 3 / 8,
    "perf/samples_per_second": 4 / 8,
    "perf/tokens_per_second": 40 / 8,
    "perf/mfu": 100 * 5 / 1000,
    "perf/mfu_percent": 50.0,
    "perf/hfu": 10 * 5 / 1000,
    "perf/dp_flop_multiplier": 10 / 100,
    "perf/carried": 0.0,
    "perf/includes_profiling": 0.0,
}


def test_metrics_are_those_of_the_unprofiled_steps_between() -> None:
    monitor, clock, kept = watch()
    train(monitor, clock, SECONDS, batches=BATCHES)

    assert kept.rows == [(4, pytest.approx(BY_HAND))]
    assert (monitor.metrics.measured_at_step, monitor.metrics.step_time_s) == (4, 8 / 3)
    assert monitor.reasons == {}


def test_nothing_is_written_before_anything_was_measured() -> None:
    monitor, clock, kept = watch(freq=3)
    train(monitor, clock, (1.0, 1.0, 1.0))

    assert (kept.rows, monitor.metrics) == ([], None)
    assert monitor.reasons["perf/mfu"] == "nothing is measured before step 3"


def test_values_are_carried_and_marked_until_they_are_measured_again() -> None:
    monitor, clock, kept = watch(freq=2)
    train(monitor, clock, (1.0, 3.0, 1.0, 7.0, 1.0, 1.0), loading_s=0.0)

    told = [(step, v["perf/step_time"], v["perf/carried"]) for step, v in kept.rows]
    assert told == [(2, 3.0, 0.0), (3, 3.0, 1.0), (4, 7.0, 0.0), (5, 7.0, 1.0)]
    assert (monitor.metrics.carried, monitor.metrics.measured_at_step) == (True, 4)


def test_a_resumed_training_goes_on_counting() -> None:
    monitor, clock, kept = watch(freq=2, first_step=1001)
    train(monitor, clock, (1.0,) * 4)

    assert [step for step, _ in kept.rows] == [1003, 1004]


def test_at_frequency_one_profiled_steps_are_timed_and_this_is_said() -> None:
    monitor, clock, kept = watch(freq=1)
    train(monitor, clock, (50.0, 3.0, 5.0))

    said = [(v["perf/step_time"], v["perf/includes_profiling"]) for _, v in kept.rows]
    assert said == [(3.0 + LOADING_S, 1.0), (5.0 + LOADING_S, 1.0)]
    assert {v["perf/carried"] for _, v in kept.rows} == {0.0}


def test_only_profiled_steps_are_counted() -> None:
    modes = []
    monitor, clock, _ = watch(freq=3)
    train(
        monitor,
        clock,
        (1.0,) * 7,
        act=lambda: modes.append(_get_current_dispatch_mode()),
    )

    assert [mode is not None for mode in modes] == [True, False, False, True, False, False, True]


def test_an_unknown_peak_leaves_use_out_with_a_reason() -> None:
    monitor, clock, kept = watch(peak_flops_per_s=None)
    train(monitor, clock, SECONDS, batches=BATCHES)

    unknown = {"perf/mfu", "perf/mfu_percent", "perf/hfu"}
    assert set(kept.rows[0][1]) == set(BY_HAND) - unknown
    assert monitor.reasons == dict.fromkeys(
        unknown, "peak_flops_per_s was not given, and a CPU has no data sheet"
    )
    assert not monitor.metrics.beyond_peak


def test_unknown_model_flops_leave_hfu_alone() -> None:
    monitor, clock, kept = watch(model_flops_per_token=None)
    train(monitor, clock, SECONDS, batches=BATCHES)

    assert kept.rows[0][1]["perf/hfu"] == pytest.approx(BY_HAND["perf/hfu"])
    assert set(monitor.reasons) == {"perf/mfu", "perf/mfu_percent", "perf/dp_flop_multiplier"}


@pytest.mark.parametrize(
    ("last_batch", "act", "reason"),
    [
        ((0, 0), multiply, "the profiled step had no tokens"),
        ((1, 6), lambda: None, "the profiled step ran no matrix product"),
    ],
)
def test_executed_flops_that_were_not_seen_are_not_zero(last_batch, act, reason) -> None:
    monitor, clock, kept = watch(freq=2)
    train(monitor, clock, (1.0,) * 3, batches=[(1, 6), (1, 6), last_batch], act=act)

    assert monitor.reasons == {"perf/hfu": reason, "perf/dp_flop_multiplier": reason}
    assert "perf/hfu" not in kept.rows[0][1]


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", H200.flops_per_s["bfloat16"]),
        ("NVIDIA H200", None, "neither was dtype"),
        ("Abacus", "bfloat16", "no data sheet of Abacus"),
    ],
)
def test_the_peak_is_the_data_sheets_where_there_is_one(monkeypatch, name, dtype, peak) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    found = find_datasheet_peak(dtype)

    assert peak in found.reason if isinstance(peak, str) else found == (peak, "")


def test_use_beyond_the_peak_is_kept_and_warned_of_once() -> None:
    monitor, clock, kept = watch(peak_flops_per_s=100.0)
    with pytest.warns(UserWarning, match="no device exceeds its peak") as warned:
        train(monitor, clock, (*SECONDS, 1.0), batches=(*BATCHES, (1, 6)))

    assert [v["perf/mfu"] for _, v in kept.rows] == pytest.approx([5.0, 5.0])
    assert monitor.metrics.beyond_peak
    assert len(warned) == 1


def test_a_failing_sink_is_told_once_and_stops_nothing() -> None:
    def fail(step, values) -> None:
        raise OSError(28, "No space left on device")

    kept = Kept()
    monitor, clock, _ = watch(freq=2, sinks=[fail, kept])
    with pytest.warns(UserWarning, match="failed at step 2.*No space left") as warned:
        train(monitor, clock, (1.0,) * 6)

    assert [step for step, _ in kept.rows] == [2, 3, 4, 5]
    assert len(warned) == 1


def test_closing_closes_every_sink_once_even_after_one_that_fails() -> None:
    class Broken(Kept):
        def close(self) -> None:
            raise OSError("gone")

    kept = Kept()
    with (
        pytest.warns(UserWarning, match="did not close.*gone"),
        watch(sinks=[Broken(), print, kept])[0] as monitor,
    ):
        pass
    monitor.close()

    assert kept.closed == 1


def test_a_step_that_failed_is_in_no_step_time() -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    monitor, clock, kept = watch(freq=3)
    train(monitor, clock, (1.0, 1.0))
    with pytest.raises(RuntimeError, match="out of memory"):
        train(monitor, clock, (1.0,), act=fail)
    train(monitor, clock, (1.0,))
    assert kept.rows == []
    with pytest.raises(RuntimeError, match="out of memory"):
        train(monitor, clock, (1.0,), act=fail)

    assert _get_current_dispatch_mode() is None


def test_arguments_that_cannot_be_meant_are_refused() -> None:
    assert_sentences("monitor/arguments", refusals_of(Monitor))


@pytest.mark.parametrize("batch", [{"samples": -1, "tokens": 6}, {"samples": 1, "tokens": 1.5}])
def test_batches_that_cannot_be_meant_are_refused(batch) -> None:
    with pytest.raises(ValueError, match="it must be a whole number of at least 0"):
        Monitor().step(**batch).__enter__()


def test_tensorboard_reads_back_what_was_written(tmp_path) -> None:
    monitor, clock, _ = watch(sinks=[TensorBoard(tmp_path / "run")])
    train(monitor, clock, (*SECONDS, 1.0), batches=[*BATCHES, (1, 6)])
    monitor.close()

    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert set(events.Tags()["scalars"]) == set(BY_HAND)
    for name, value in BY_HAND.items():
        carried = 1.0 if name == "perf/carried" else value
        read = [(event.step, event.value) for event in events.Scalars(name)]
        assert read == [(4, pytest.approx(value)), (5, pytest.approx(carried))]


def test_weights_and_biases_is_asked_for_where_it_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'dpprof\[wandb\]'"):
        WeightsAndBiases(project="p")


@pytest.mark.parametrize("method", ["standard", "opacus-hooks", "opacus-ghost", "flash-bk"])
def test_a_watched_training_ends_with_the_same_parameters(method) -> None:
    def parameters_after(monitor: Monitor | None) -> list[torch.Tensor]:
        experiment = make_experiment(method=method, batch_size=2)
        training = set_up(
            experiment, registry.load("methods", method), torch.device("cpu"), lambda *_: None
        )
        for _ in range(3):
            with monitor.step(samples=2, tokens=8) if monitor else nullcontext():
                training.step.run(training.batch, lambda _: None)
        return list(training.step.module.parameters())

    watched, alone = parameters_after(Monitor(flops_profile_freq=2)), parameters_after(None)

    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))


def test_the_guides_example_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    exec(find_code("how-to/monitor.md", "Monitor"), {"__name__": "__main__"})  # noqa: S102

    events = EventAccumulator("runs/example").Reload().Scalars("perf/mfu")
    assert [event.step for event in events] == list(range(10, 25))
