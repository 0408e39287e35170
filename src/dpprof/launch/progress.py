"""Prints a sweep's progress: experiment k of n, the present run, the time left.

When a sweep starts, Snakemake's main process writes the list of planned runs, and names the file in
the environment. Every supervisor appends a line when its run ends, so that all can compute the
progress.
"""

import contextlib
import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from dpprof.records.result import Kernels, Result
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import PREDICTIONS
from dpprof.system.console import say
from dpprof.system.files import write_atomically

_VARIABLE = "DPPROF_PROGRESS"

_PLANNED = TypeAdapter(dict[str, str])
_ENDED = TypeAdapter(dict[str, float])
"""The first line of a progress file, kinds by run, and a later line, the seconds of a run."""


class Progress:
    """A sweep's progress file.

    The first line has the planned runs with their kinds, each later line a run that has ended.
    """

    def __init__(self, path: Path) -> None:
        first, *others = path.read_text(encoding="utf-8").splitlines()
        self._path = path
        self._kinds = _PLANNED.validate_json(first)
        self._walls: dict[str, float] = {}
        for text in others:
            with contextlib.suppress(ValueError):  # cut by a full disk or a kill
                self._walls |= _ENDED.validate_json(text)

    @classmethod
    def start(cls, path: Path, runs: Iterable[tuple[str, Experiment]]) -> None:
        """Write a sweep's file and name it in the environment of Snakemake's processes.

        If the file cannot be written, for example because a folder has its name, the environment
        names none. ``runs`` has a unique name and the experiment of every planned run.
        """
        kinds = {name: f"{one.model_name} {one.method}" for name, one in runs}
        os.environ.pop(_VARIABLE, None)
        with contextlib.suppress(OSError):
            write_atomically(path, json.dumps(kinds) + "\n")
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
        if not self._walls:
            return None
        by_kind: dict[str, list[float]] = {}
        for name, wall_s in self._walls.items():
            by_kind.setdefault(self._kinds.get(name, ""), []).append(wall_s)
        return sum(
            statistics.median(by_kind.get(kind) or self._walls.values())
            for name, kind in self._kinds.items()
            if name not in self._walls
        )

    def announce(self, name: str) -> None:
        """Print the run that starts now, its number, and the time left."""
        total = len(self._kinds)
        number = min(len(self._walls) + 1, total)
        left = self.seconds_left()
        when = "" if left is None else f", about {format_duration(left)} left"
        say(f"[{number}/{total}] {name}{when}")

    def conclude(self, name: str, result: Result) -> None:
        """Append a run that has ended, if the file can be written."""
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: result.wall_s}) + "\n")


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
    if result.kernels is not None:
        text += f": {_tell_kernels(result.kernels)}"
    if result.error is not None:
        phase = f" in {result.error.phase}" if result.error.phase else ""
        text += f": {result.error.kind}{phase}: {result.error.message[:200]}"
    say(f"        {text}")


def _tell_kernels(kernels: Kernels) -> str:
    """Return the op kinds that take most of a traced step, and the idle share."""
    parts = sorted(kernels.by_op_kind.items(), key=lambda part: part[1], reverse=True)[:3]
    shares = [f"{name} {seconds / kernels.step_s:.0%}" for name, seconds in parts]
    told = ", ".join([*shares, f"idle {kernels.idle_s / kernels.step_s:.0%}"])
    return f"traced step {kernels.step_s * 1000:.1f} ms, {told}"


def format_duration(seconds: float) -> str:
    """Return a duration as text: ``8 s``, ``2 min 5 s``, ``1 h 12 min``."""
    whole = round(seconds)
    if whole < 60:  # noqa: PLR2004 (seconds in a minute)
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:  # noqa: PLR2004 (minutes in an hour)
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
