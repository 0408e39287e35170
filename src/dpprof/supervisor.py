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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn

from pydantic import ValidationError

from dpprof.experiment import Experiment
from dpprof.handover import Assignment, PhaseMark, Report
from dpprof.hardware import available_cores, describe_cpu, describe_gpu, visible_gpus
from dpprof.lock import hold_one
from dpprof.provenance import collect
from dpprof.result import SCHEMA_VERSION, Attempt, Failure, Measurement, Result, write_result
from dpprof.sources import PACKAGE, code_digest

MAX_ATTEMPTS = 2
"""A crash or a kill is tried once more in a fresh process; other outcomes are final."""

_RETRIED = ("crashed", "killed")
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TAIL_LINES = 20


class _Place(NamedTuple):
    """Where the worker runs: what to call the device, and how to make it the only one."""

    lock_name: str
    device: dict[str, Any]
    environment: dict[str, str]


def _places(experiment: Experiment) -> list[_Place]:
    """List the interchangeable devices that this experiment could run on."""
    threads = str(experiment.cpu_threads or available_cores())
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    cpu = _Place("cpu", describe_cpu(int(threads)), environment)
    if experiment.device == "cpu":
        return [cpu]
    return [
        _Place(
            f"cuda-{gpu.uuid}",
            describe_gpu(gpu),
            environment | {"CUDA_VISIBLE_DEVICES": gpu.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        )
        for gpu in visible_gpus()
    ] or [cpu]  # no GPU: the worker records why


class _Log:
    """Where the worker's output goes, and the last of it for a failure's message."""

    def __init__(self, sinks: Iterable[IO[str]]) -> None:
        self._sinks = list(sinks)
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)

    def write(self, line: str) -> None:
        """Pass a line on; a sink that is full or gone does not end the experiment."""
        self.tail.append(line)
        for sink in self._sinks:
            with suppress(OSError):
                sink.write(line)
                sink.flush()

    def follow(self, stream: IO[bytes]) -> None:
        """Pass on everything from a stream, until it ends."""
        with io.TextIOWrapper(stream, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self.write(line)

    @property
    def last_line(self) -> str:
        """The last line that says something."""
        return next((line.strip() for line in reversed(self.tail) if line.strip()), "")


def _run_worker(
    experiment: Experiment, instrument: str, place: _Place, lock_fd: int, log: _Log
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
        search_path = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
        start = time.monotonic()
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "dpprof.worker", assignment.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lock_fd, phase_file.fileno(), report_file.fileno()),
            start_new_session=True,
            env=os.environ
            | place.environment
            | {"PYTHONPATH": os.pathsep.join(filter(None, search_path)), "PYTHONUNBUFFERED": "1"},
        )
        assert worker.stdout is not None
        follower = threading.Thread(target=log.follow, args=(worker.stdout,), daemon=True)
        follower.start()
        timed_out = False
        try:
            worker.wait(timeout=experiment.timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        wall_s = time.monotonic() - start
        follower.join(timeout=5)
        report_file.seek(0)
        report = _read_report(report_file.read())
        if timed_out:
            failure = Failure(
                kind="Timeout",
                message=f"ended after timeout_s = {experiment.timeout_s:g} s",
                phase=mark.read(),
            )
            return Attempt(outcome="timeout", wall_s=wall_s, error=failure), None
        if report is not None:
            attempt = Attempt(outcome=report.outcome, wall_s=wall_s, error=report.error)
            return attempt, report.measurement
        return _judge_death(worker.returncode, wall_s, mark, log), None


def _read_report(content: bytes) -> Report | None:
    """Read a worker's report; a worker that died while writing left none."""
    try:
        return Report.model_validate_json(content)
    except ValidationError:
        return None


def _judge_death(returncode: int, wall_s: float, mark: PhaseMark, log: _Log) -> Attempt:
    """Judge a worker that left no report by its exit status and its last words."""
    number = -returncode
    name = signal.Signals(number).name if number > 0 else None
    if any("std::bad_alloc" in line for line in log.tail):
        outcome, kind, message = "oom", "std::bad_alloc", log.last_line
    elif number in _FROM_OUTSIDE:
        outcome, kind = "killed", str(name)
        message = f"ended by {name} from outside"
        if number == signal.SIGKILL:
            message += ", for example by the kernel when the host runs out of memory"
    else:
        outcome, kind = "crashed", name or f"exit code {returncode}"
        message = log.last_line or "ended without a word"
    failure = Failure(
        kind=kind,
        message=message,
        phase=mark.read(),
        signal=name,
        exit_code=returncode if number <= 0 else None,
    )
    return Attempt.model_validate({"outcome": outcome, "wall_s": wall_s, "error": failure})


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

    Raises:
        OSError: The result cannot be written.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    measuring_code = code_digest(instrument, experiment.method)
    places = _places(experiment)

    def waiting() -> None:
        busy = "the CPU is" if experiment.device == "cpu" else "every visible GPU is"
        print(f"dpprof: {busy} taken by another experiment; waiting", file=sys.stderr, flush=True)

    attempts: list[Attempt] = []
    measurement: Measurement | None = None
    with (
        _ended_by_signals(),
        _opened(log_path) as log_file,
        hold_one([place.lock_name for place in places], waiting) as (position, lock_fd),
    ):
        place = places[position]
        log = _Log([log_file])
        started_at = dt.datetime.now(dt.UTC)
        start = time.monotonic()
        while len(attempts) < MAX_ATTEMPTS:
            log.write(f"dpprof: {experiment.id} {instrument} r{replicate}\n")
            attempt, measurement = _run_worker(experiment, instrument, place, lock_fd, log)
            if attempt.error is not None:
                error = attempt.error.model_copy(update={"log": log_path and str(log_path)})
                attempt = attempt.model_copy(update={"error": error})
            attempts.append(attempt)
            log.write(f"dpprof: attempt {len(attempts)}: {attempt.outcome}\n")
            if attempt.outcome not in _RETRIED:
                break
        wall_s = time.monotonic() - start
    return write_result(
        output,
        {
            **(measurement or Measurement()).model_dump(),
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
            "device": place.device,
            "provenance": collect(experiment),
        },
    )


@contextmanager
def _opened(log_path: Path | None) -> Iterator[IO[str]]:
    if log_path is None:
        yield sys.stderr
        return
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w", encoding="utf-8") as file:
        yield file
