"""The outside of an experiment's process: lock, limits, retries, and one JSON always.

Imports no torch, so it starts fast and nothing that a measurement does can hurt it.
"""

import collections
import datetime as dt
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from pydantic import ValidationError

from dpprof.catalogue import PREDICTIONS
from dpprof.closing import JOINED
from dpprof.console import say
from dpprof.experiment import Experiment
from dpprof.handover import TRACES, Assignment, PhaseMark, Report
from dpprof.hardware import available_cores
from dpprof.lock import hold_one
from dpprof.neighbours import Neighbours
from dpprof.places import Place, cpu_place, gpu_places
from dpprof.provenance import collect
from dpprof.result import (
    SCHEMA_VERSION,
    Attempt,
    Failure,
    Measurement,
    Outcome,
    Phase,
    Result,
    write_result,
)
from dpprof.sources import PACKAGE, code_digest
from dpprof.storage import check_writable

MAX_ATTEMPTS = 2
"""A crash or a kill is tried once more in a fresh process; other outcomes are final."""

_RETRIED = ("crashed", "killed")
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TAIL_LINES = 20


def _places(experiment: Experiment, instrument: str) -> list[Place]:
    """List the interchangeable devices that this experiment could run on.

    Predictions take the CPU, whatever they are about.
    """
    threads = experiment.cpu_threads or available_cores()
    cpu = cpu_place(threads)
    if experiment.device == "cpu" or instrument in PREDICTIONS:
        return [cpu]
    return gpu_places(threads) or [cpu]  # no GPU: the worker records why


class _Sink:
    """Where a run's output goes: a file, or standard error. Writing never fails.

    Unbuffered, so that nothing is left to write when a full disk has refused once.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0) if path else None

    def write(self, line: str) -> None:
        """Write a line as it is."""
        with suppress(OSError, ValueError):
            if self._file is None:
                sys.stderr.write(line)
                sys.stderr.flush()
            else:
                self._file.write(line.encode(errors="replace"))

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()


class _LastWords:
    """Passes a worker's output on and remembers the end of it."""

    def __init__(self, stream: IO[bytes], sink: _Sink) -> None:
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._thread = threading.Thread(target=self._follow, args=(stream, sink), daemon=True)
        self._thread.start()

    def _follow(self, stream: IO[bytes], sink: _Sink) -> None:
        with io.TextIOWrapper(stream, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                sink.write(line)
                self._tail.append(line.strip())

    def lines(self) -> list[str]:
        """Wait for the end of the output, for a while, and return its last lines."""
        self._thread.join(timeout=5)
        return [line for line in self._tail.copy() if line]


def _run_worker(
    experiment: Experiment, instrument: str, environment: dict[str, str], lock_fd: int, sink: _Sink
) -> tuple[Attempt, Measurement | None]:
    """Run one attempt in a fresh process and judge how it ended."""
    # Files without names: nothing is left behind, whoever is killed when.
    with tempfile.TemporaryFile() as phase_file, tempfile.TemporaryFile() as report_file:
        mark = PhaseMark(phase_file.fileno())
        assignment = Assignment(
            experiment=experiment,
            instrument=instrument,
            supervisor_pid=os.getpid(),
            phase_fd=phase_file.fileno(),
            report_fd=report_file.fileno(),
        )
        start, neighbours = time.monotonic(), Neighbours()
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "dpprof.worker", assignment.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lock_fd, phase_file.fileno(), report_file.fileno()),
            start_new_session=True,
            env=environment,
        )
        assert worker.stdout is not None
        last_words = _LastWords(worker.stdout, sink)
        timed_out = False
        try:
            worker.wait(timeout=experiment.timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        wall_s, others = time.monotonic() - start, neighbours.busy_cores()
        ended = partial(Attempt, wall_s=wall_s, others_busy_cores=others)
        report_file.seek(0)
        report = _read_report(report_file.read())
        if report is not None:  # also of a worker that hung or died after it had finished
            return ended(outcome=report.outcome, error=report.error), report.measurement
        if timed_out:
            failure = Failure(
                kind="Timeout",
                message=f"ended after timeout_s = {experiment.timeout_s:g} s",
                phase=mark.read(),
            )
            return ended(outcome="timeout", error=failure), None
        outcome, failure = _judge_death(worker.returncode, mark.read(), last_words.lines())
        return ended(outcome=outcome, error=failure), None


def _read_report(content: bytes) -> Report | None:
    """Read a worker's report; a worker that died while writing left none."""
    try:
        return Report.model_validate_json(content)
    except ValidationError:
        return None


def _judge_death(
    returncode: int, phase: Phase, last_words: Sequence[str]
) -> tuple[Outcome, Failure]:
    """Judge a worker that left no report by its exit status and its last words."""
    number = -returncode
    name = _signal_name(number) if number > 0 else None
    last = last_words[-1] if last_words else "ended without a word"
    outcome: Outcome = "crashed"
    kind, message = name or f"exit code {returncode}", last
    if any("std::bad_alloc" in line for line in last_words):
        outcome, kind = "oom", "std::bad_alloc"
    elif number in _FROM_OUTSIDE:
        outcome, message = "killed", f"ended by {name} from outside"
        if number == signal.SIGKILL:
            message += ", for example by the kernel when the host runs out of memory"
    return outcome, Failure(
        kind=kind,
        message=message,
        phase=phase,
        signal=name,
        exit_code=None if name else returncode,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit that ends the worker on its way out."""

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
) -> Result:
    """Run one experiment to an end of any kind and leave one complete JSON.

    The clock starts when the device's lock is held. A crash or a kill is tried once
    more; every attempt is in the result.

    Args:
        experiment: What to run.
        instrument: What watches it.
        replicate: Which repetition this is.
        output: The result file; written as a whole at the end.
        log_path: Where the worker's output goes; standard error where it is None.
        traces: A folder for what an instrument leaves beside the result; None for nowhere.

    Raises:
        OSError: The result cannot be written; found out before anything is measured.
    """
    check_writable(output)
    measuring_code = code_digest(instrument, experiment)
    places = _places(experiment, instrument)

    def waiting() -> None:
        busy = "the CPU is" if places[0].lock_name == "cpu" else "every visible GPU is"
        say(f"{busy} taken by another experiment; waiting")

    attempts: list[Attempt] = []
    measurement: Measurement | None = None
    with (
        _ended_by_signals(),
        closing(_Sink(log_path)) as sink,
        hold_one(
            [place.lock_name for place in places], waiting, shared=instrument in PREDICTIONS
        ) as (position, lock_fd),
    ):
        place = places[position]
        environment = _worker_environment(place, traces)
        device, provenance = place.describe(), collect(experiment, environment)
        started_at = dt.datetime.now(dt.UTC)
        start = time.monotonic()
        while len(attempts) < MAX_ATTEMPTS:
            sink.write(f"dpprof: {experiment.id} {instrument} r{replicate}\n")
            attempt, measurement = _run_worker(experiment, instrument, environment, lock_fd, sink)
            if attempt.error is not None:
                error = attempt.error.model_copy(update={"log": log_path and str(log_path)})
                attempt = attempt.model_copy(update={"error": error})
            attempts.append(attempt)
            sink.write(f"dpprof: attempt {len(attempts)}: {attempt.outcome}\n")
            if attempt.outcome not in _RETRIED:
                break
        wall_s = time.monotonic() - start
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


def _worker_environment(place: Place, traces: Path | None) -> dict[str, str]:
    search_path = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, search_path)), "PYTHONUNBUFFERED": "1"}
    own[TRACES] = "" if traces is None else str(traces)
    return os.environ | place.environment | own
