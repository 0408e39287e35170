"""Runs an experiment in a worker process, with lock, limits and retries, and writes one JSON.

It imports no torch, so it starts fast, and a crash of a measurement does not affect it.
"""

import datetime as dt
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pydantic import ValidationError

from dpprof.launch.contention import Contention
from dpprof.launch.device_lock import hold_one, who_holds
from dpprof.launch.device_slots import DeviceSlot, cpu_slot, gpu_slots
from dpprof.launch.exit_status import judge_death
from dpprof.launch.gpu_contention import look_afterwards, look_at, tell_others, wait_until_idle
from dpprof.launch.protocol import TRACES, Assignment, PhaseMark, Report
from dpprof.planning.code_digest import code_digest
from dpprof.planning.code_in_use import CodeInUse
from dpprof.records.provenance import collect
from dpprof.records.reconciliation import JOINED
from dpprof.records.record import ResultError
from dpprof.records.result import (
    SCHEMA_VERSION,
    Attempt,
    Failure,
    Measurement,
    Others,
    Result,
    read_result,
    write_result,
)
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import PREDICTIONS
from dpprof.system.child_output import Output, Sink
from dpprof.system.console import say
from dpprof.system.files import check_writable
from dpprof.system.hardware import available_cores
from dpprof.system.paths import PACKAGE
from dpprof.system.process_groups import end_group, no_survivors

MAX_ATTEMPTS = 2
"""A run that crashed or was killed is tried again in a fresh process; other outcomes are final."""

_RETRIED = ("crashed", "killed")

Ended = tuple[Attempt, Measurement | None]
"""An attempt and its measurement, if there is one."""


def _slots(experiment: Experiment, instrument: str) -> list[DeviceSlot]:
    """Return the interchangeable devices that this experiment can run on.

    Predictions run on the CPU, whatever device they are for.
    """
    threads = experiment.cpu_threads or available_cores()
    cpu = cpu_slot(threads)
    if experiment.device == "cpu" or instrument in PREDICTIONS:
        return [cpu]
    slots = gpu_slots(threads) or [cpu]  # no GPU: the worker records why
    if experiment.wait_for_idle_gpu_s:
        slots.sort(key=lambda slot: look_at(slot.uuid).matter)
    return slots


def _look_around(run: Callable[[], Ended], uuid: str | None) -> Ended:
    """Run one attempt, and record other processes' use of the GPU before and after."""
    before = look_at(uuid)
    attempt, measurement = run()
    after = look_afterwards(uuid)
    error = attempt.error
    if error is not None and attempt.outcome == "oom":
        error = tell_others(error, before, after)
    seen = {"others_before": before, "others_after": after, "error": error}
    return attempt.model_copy(update=seen), measurement


def _run_worker(
    experiment: Experiment, instrument: str, environment: dict[str, str], lock_fd: int, sink: Sink
) -> Ended:
    """Run one attempt in a fresh process and judge how it ended."""
    # Files without names disappear even if a process is killed.
    with tempfile.TemporaryFile() as phase_file, tempfile.TemporaryFile() as report_file:
        mark = PhaseMark(phase_file.fileno())
        assignment = Assignment(
            experiment=experiment,
            instrument=instrument,
            supervisor_pid=os.getpid(),
            phase_fd=phase_file.fileno(),
            report_fd=report_file.fileno(),
            lock_fd=lock_fd,
        )
        start, contention = time.monotonic(), Contention()
        timed_out = False
        with no_survivors():
            worker = subprocess.Popen(
                [sys.executable, "-P", "-m", "dpprof.launch.worker", assignment.model_dump_json()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(lock_fd, phase_file.fileno(), report_file.fileno()),
                start_new_session=True,
                env=environment,
            )
            assert worker.stdout is not None
            output = Output(worker.stdout, sink)
            try:
                worker.wait(timeout=experiment.timeout_s)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                end_group(worker.pid)
                worker.wait()
        wall_s, others = time.monotonic() - start, contention.busy_cores()
        tail = output.finish()
        ended = partial(Attempt, wall_s=wall_s, others_busy_cores=others)
        report_file.seek(0)
        report = _read_report(report_file.read())
        if report is not None:  # even if the worker hung or died after its report
            return ended(outcome=report.outcome, error=report.error), report.measurement
        if timed_out:
            failure = Failure(
                kind="Timeout",
                message=f"ended after timeout_s = {experiment.timeout_s:g} s",
                phase=mark.read(),
            )
            return ended(outcome="timeout", error=failure), None
        limited = experiment.memory_limit_bytes is not None
        outcome, failure = judge_death(worker.returncode, mark.read(), tail, limited=limited)
        return ended(outcome=outcome, error=failure), None


def _read_report(content: bytes) -> Report | None:
    """Return a worker's report; None if the worker died before it was complete."""
    try:
        return Report.model_validate_json(content)
    except ValidationError:
        return None


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``SystemExit``, so that the worker is ended too."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(
    experiment: Experiment,
    instrument: str,
    replicate: int,
    output: Path,
    log_path: Path | None = None,
    *,
    traces: Path | None = None,
    keep: bool = False,
) -> Result:
    """Run one experiment until it ends in any way, and write one complete JSON.

    The clock starts when the device's lock is held. A run that crashed or was killed is tried once
    more. The result has every attempt.

    Args:
        experiment: The experiment.
        instrument: The instrument to run it under.
        replicate: The number of the replicate.
        output: The result file; written as a whole at the end.
        log_path: The file for the worker's output; None for standard error.
        traces: The folder for an instrument's trace files; None for none.
        keep: Whether to return an existing complete result of this run by the present code, which
            a process wrote after its Snakemake was killed.

    Raises:
        OSError: The result cannot be written; this is checked before the measurement.
    """
    check_writable(output)
    code = CodeInUse(partial(code_digest, instrument, experiment), __file__)
    slots = _slots(experiment, instrument)

    def waiting() -> None:
        busy = "the CPU is" if slots[0].lock_name == "cpu" else "every visible GPU is"
        holders = who_holds(slot.lock_name for slot in slots)
        say(f"{busy} taken by another experiment; waiting for {holders}")

    attempts: list[Attempt] = []
    measurement: Measurement | None = None
    with (
        _ended_by_signals(),
        closing(Sink(log_path)) as sink,
        hold_one([slot.lock_name for slot in slots], waiting, shared=instrument in PREDICTIONS) as (
            position,
            lock_fd,
        ),
    ):
        if keep and (finished := _read_finished(output, experiment, instrument, replicate)):
            say("this code has already measured this run; its result is kept")
            return finished
        slot = slots[position]
        wait_until_idle(slot.uuid, experiment.wait_for_idle_gpu_s, _say_busy)
        code.start()
        environment = _worker_environment(slot, traces)
        device, provenance = slot.describe(), collect(experiment, environment)
        started_at = dt.datetime.now(dt.UTC)
        start = time.monotonic()
        while len(attempts) < MAX_ATTEMPTS:
            sink.write(f"dpprof: {experiment.id} {instrument} r{replicate}\n")
            run = partial(_run_worker, experiment, instrument, environment, lock_fd, sink)
            attempt, measurement = _look_around(run, slot.uuid)
            if attempt.error is not None:
                error = attempt.error.model_copy(update={"log": log_path and str(log_path)})
                attempt = attempt.model_copy(update={"error": error})
            attempts.append(attempt)
            sink.write(f"dpprof: attempt {len(attempts)}: {attempt.outcome}\n")
            if attempt.outcome not in _RETRIED:
                break
        wall_s = time.monotonic() - start
        measuring_code = code.settle()
    measured = (measurement or Measurement()).model_dump()
    measured["reasons"] |= {"verification": JOINED}
    return write_result(
        output,
        {
            **measured,
            "schema_version": SCHEMA_VERSION,
            "experiment_id": experiment.id,
            "experiment": experiment,
            "spec_digest": experiment.digest,
            "code_digest": measuring_code,
            "instrument": instrument,
            "replicate": replicate,
            "outcome": attempts[-1].outcome,
            "error": attempts[-1].error,
            "attempts": attempts,
            "started_at": started_at.isoformat(timespec="microseconds"),
            "wall_s": wall_s,
            "device": device,
            "provenance": provenance,
        },
    )


def _read_finished(
    path: Path, experiment: Experiment, instrument: str, replicate: int
) -> Result | None:
    """Return a result if it is complete, this run's, and measured by the present code."""
    try:
        result = read_result(path)
    except (FileNotFoundError, ResultError):
        return None
    found = (result.spec_digest, result.instrument, result.replicate, result.code_digest)
    asked = (experiment.digest, instrument, replicate, code_digest(instrument, experiment))
    return result if found == asked else None


def _say_busy(others: Others) -> None:
    memory, load = others.memory_bytes or 0, others.load or 0.0
    say(f"others hold {memory / 2**30:.1f} GiB of the GPU, busy {load:.0%}; waiting for them")


def _worker_environment(slot: DeviceSlot, traces: Path | None) -> dict[str, str]:
    search_path = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, search_path)), "PYTHONUNBUFFERED": "1"}
    own[TRACES] = "" if traces is None else str(traces)
    return os.environ | slot.environment | own
