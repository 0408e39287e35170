"""Prints what a sweep is about to do, and its progress: run k of n, and the time left.

When a sweep starts, Snakemake's main process writes the list of planned runs, and names the file in
the environment. Every supervisor appends a line when its run begins and one when it ends, so that
all can compute the progress, and ``dpprof watch`` can tell what runs.
"""

import contextlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import psutil
from pydantic import BaseModel, Field, TypeAdapter

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.registry import PREDICTIONS
from dpprof.experiments.records.result import Result
from dpprof.system.console import say
from dpprof.system.files import write_atomically

_VARIABLE = "DPPROF_PROGRESS"

_Seconds = Annotated[float, Field(ge=0, le=1e10)]
"""A number of seconds; infinity, which cannot be added up, is refused."""

_CLOCKS_DIFFER_S = 5.0
"""The most by which the start of a process, as told by the kernel, may be late."""


class Began(BaseModel, frozen=True, extra="forbid"):
    """The beginning of a run, or of the sweep, by a process: another line of a progress file."""

    began: str | None  # the run's name; None for the sweep
    pid: int
    host: str
    at_s: _Seconds  # seconds since 1970

    @classmethod
    def now(cls, name: str | None) -> Self:
        """Return that this process begins a run, or the sweep."""
        return cls(began=name, pid=os.getpid(), host=platform.node(), at_s=time.time())

    def goes_on(self) -> bool | None:
        """Return whether the process is alive; None if it is another machine's."""
        if self.host != platform.node():
            return None
        try:
            process = psutil.Process(self.pid)
            young = process.create_time() > self.at_s + _CLOCKS_DIFFER_S  # has a dead one's number
            return not young and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, ValueError, OverflowError):
            return False


_FIRST = TypeAdapter(dict[str, str])
_LATER: TypeAdapter[Began | dict[str, float]] = TypeAdapter(Began | dict[str, _Seconds])
"""Lines of a progress file: the first has kinds by run, and a later one may have the seconds of a
run."""


class Progress:
    """A sweep's progress file.

    The first line has the planned runs with their kinds. Each later line says that the sweep or a
    run has begun, or that a run has ended.
    """

    def __init__(self, path: Path) -> None:
        first, *others = path.read_text(encoding="utf-8").splitlines()
        self._path = path
        self.kinds: Mapping[str, str] = _FIRST.validate_json(first)
        """The model and method of each planned run, by the run's name."""
        self.ended: dict[str, float] = {}
        """The seconds that each ended run took, by its name."""
        self._began: dict[str, Began] = {}
        self.sweep: Began | None = None
        """The sweep's own beginning; None if the file does not say."""
        for text in others:
            with contextlib.suppress(ValueError):  # cut by a full disk or a kill
                line = _LATER.validate_json(text)
                if not isinstance(line, Began):
                    self.ended |= line
                elif line.began is None:
                    self.sweep = line
                else:
                    self._began[line.began] = line

    def goes_on(self) -> bool | None:
        """Return whether the sweep's Snakemake is alive; None if that cannot be told."""
        return None if self.sweep is None else self.sweep.goes_on()

    def running(self) -> list[Began]:
        """Return the runs that have begun, not ended, and whose process is alive.

        Another machine's process counts as alive unless the sweep is known to have ended.
        """
        open_ = [run for name, run in self._began.items() if name not in self.ended]
        is_over = self.goes_on() is False
        alive = ((run, run.goes_on()) for run in open_)
        return [run for run, is_alive in alive if is_alive or (is_alive is None and not is_over)]

    @classmethod
    def start(cls, path: Path, runs: Iterable[tuple[str, Experiment]]) -> None:
        """Write a sweep's file and name it in the environment of Snakemake's processes.

        If the file cannot be written, for example because a folder has its name, the environment
        names none. ``runs`` has a unique name and the experiment of every planned run.
        """
        kinds = {name: f"{experiment.model_name} {experiment.method}" for name, experiment in runs}
        os.environ.pop(_VARIABLE, None)
        with contextlib.suppress(OSError):
            write_atomically(path, f"{json.dumps(kinds)}\n{Began.now(None).model_dump_json()}\n")
            os.environ[_VARIABLE] = str(path.resolve())

    @classmethod
    def current(cls) -> Self | None:
        """Return the progress of this process's sweep; None if its file cannot be read.

        A problem with progress must never make a measurement fail.
        """
        try:
            return cls(Path(os.environ[_VARIABLE]))
        except (KeyError, OSError, ValueError):
            return None

    def seconds_left(self) -> float | None:
        """Return the estimated time of the remaining runs, from the runs that have ended.

        The estimate of a run is the median of its kind (model and method), or of all runs if none
        of its kind has ended. None until the first run has ended.
        """
        if not self.ended:
            return None
        by_kind: dict[str, list[float]] = {}
        for name, wall_s in self.ended.items():
            by_kind.setdefault(self.kinds.get(name, ""), []).append(wall_s)
        return sum(
            statistics.median(by_kind.get(kind) or self.ended.values())
            for name, kind in self.kinds.items()
            if name not in self.ended
        )

    def announce(self, name: str) -> None:
        """Print the run that starts now, its number, and the time left; append that it begins."""
        total = len(self.kinds)
        number = min(len(self.ended) + 1, total)
        left = self.seconds_left()
        when = "" if left is None else f", about {format_duration(left)} left"
        say(f"[{number}/{total}] {name}{when}")
        self._append(Began.now(name).model_dump_json())

    def conclude(self, name: str, result: Result) -> None:
        """Append a run that has ended, if the file can be written."""
        self._append(json.dumps({name: result.wall_s}))

    def _append(self, line: str) -> None:
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def run_name(experiment_id: str, instrument: str, replicate: int) -> str:
    """Return a run's name for messages and for the progress file."""
    return f"{experiment_id} {instrument} r{replicate}"


def tell_result(result: Result) -> None:
    """Print the result of a run in one line."""
    text = f"{result.outcome} after {format_duration(result.wall_s)}"
    if result.time is not None and result.time.median_s is not None:
        text += f": step {result.time.median_s * 1000:.1f} ms"
    memory = result.memory
    if result.capacity is not None:
        text += f": a batch of {result.capacity.batch_size:,} fits"
    elif memory is not None and memory.peak_allocated_bytes is not None:
        what = "predicted peak" if result.instrument in PREDICTIONS else "peak allocated"
        text += f", {what} {memory.peak_allocated_bytes / 2**20:,.0f} MiB"
    elif memory is not None and memory.peak_rss_bytes is not None:
        text += f", peak RSS {memory.peak_rss_bytes / 2**20:,.0f} MiB"
    if (kernels := result.kernels) is not None:
        parts = sorted(kernels.by_op_kind.items(), key=lambda part: part[1], reverse=True)[:3]
        shares = [f"{name} {seconds / kernels.step_s:.0%}" for name, seconds in parts]
        told = ", ".join([*shares, f"idle {kernels.idle_s / kernels.step_s:.0%}"])
        text += f": traced step {kernels.step_s * 1000:.1f} ms, {told}"
    if (error := result.error) is not None:
        phase = f" in {error.phase}" if error.phase else ""
        text += f": {error.kind}{phase}: {error.message[:200]}"
    say(f"        {text}")


def format_duration(seconds: float) -> str:
    """Return a duration as text: ``8 s``, ``2 min 5 s``, ``1 h 12 min``."""
    whole = round(seconds)
    if whole < 60:  # noqa: PLR2004 (seconds in a minute)
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:  # noqa: PLR2004 (minutes in an hour)
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


class _Jobs(NamedTuple):
    """Jobs of one kind, a part of a sweep."""

    singular: str
    plural: str
    seconds: float  # seconds of one job, with a small model on a common processor
    alone: bool  # whether nothing runs beside such a job


_PARTS = {
    "ceilings": _Jobs("device's ceilings", "devices' ceilings", 45, alone=True),
    "measurement": _Jobs("measurement", "measurements", 8, alone=True),
    "prediction": _Jobs("prediction", "predictions", 8, alone=False),
    "verify": _Jobs("verification", "verifications", 6, alone=False),
    "tables": _Jobs("set of tables", "sets of tables", 4, alone=True),
    "figure": _Jobs("figure", "figures", 3, alone=False),
    "report": _Jobs("report", "reports", 12, alone=True),
}
"""The parts of a sweep, in the order in which most of them run."""


def tell_to_do(jobs: Mapping[str, int], cores: int) -> Iterator[str]:
    """Say how many jobs of each part there are, and about how long they take.

    Args:
        jobs: Number of jobs by part; parts that are not in ``_PARTS`` are not spoken of.
        cores: On how many cores jobs share that may run beside one another.

    Example:
        >>> for line in tell_to_do({"verify": 4, "report": 1}, cores=2):
        ...     print(line)
        to do, about 24 s with small models on a processor:
          4 verifications, about 12 s
          1 report, about 12 s
    """
    seconds = {
        name: part.seconds * (jobs[name] if part.alone else math.ceil(jobs[name] / cores))
        for name, part in _PARTS.items()
        if jobs.get(name)
    }
    if not seconds:
        return
    yield f"to do, about {format_duration(sum(seconds.values()))} with small models on a processor:"
    for name, taken in seconds.items():
        what = _PARTS[name].singular if jobs[name] == 1 else _PARTS[name].plural
        yield f"  {jobs[name]} {what}, about {format_duration(taken)}"
