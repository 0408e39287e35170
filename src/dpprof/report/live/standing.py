"""How a sweep stands: what has ended, failed, runs and remains, from the files that it leaves."""

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.launch.progress import Began, Progress, run_name, tell_failure
from dpprof.planning.artifacts import LIMITS, PLAN, RESULTS, VERDICT, spec_path
from dpprof.planning.planner import Manifest, PlannedRun, read_manifest
from dpprof.records.record import ResultError
from dpprof.records.result import read_run
from dpprof.spec.experiment import read_spec
from dpprof.spec.validation import InputError

Stamp = tuple[int, int, int]
"""What tells two versions of a file apart: inode, time of its last change in ns, size."""

_MOST_FAILURES = 200
"""Failures beyond these are counted but not listed."""

DAMAGED = "damaged"
"""In place of an outcome: the result file cannot be trusted."""


class EndedRun(NamedTuple):
    """What a result file says, as far as the standing of a sweep needs it."""

    outcome: str
    reason: str | None
    """Why it did not end ok."""

    wall_s: float | None


class Standing(NamedTuple):
    """How a sweep stands."""

    manifest: Path
    results: dict[str, Stamp]
    """The results of the manifest's runs that exist, by path relative to the root."""

    others: dict[str, Stamp]
    """What else the report is made of: the manifest, verdicts and ceilings."""

    told: dict[str, Any]
    """How the sweep stands, for a reader, as JSON has it."""


def find_manifest(root: Path) -> Path:
    """Return the manifest of the config that was planned last.

    Planning rewrites a config's ``due-*.txt`` where anything is to be made.

    Raises:
        InputError: There is no folder ``results``, or no sweep was planned in it.
    """
    results = root / RESULTS
    if not results.is_dir():
        raise InputError(f"{results}: is not a folder; run snakemake, which makes it")
    dues = _newest_first((root / PLAN).glob("due-*.txt"))
    ordered = [due.with_name(due.stem.replace("due-", "manifest-", 1) + ".json") for due in dues]
    ordered += _newest_first((root / PLAN).glob("manifest-*.json"))
    found = next((path for path in ordered if path.is_file()), None)
    if found is None:
        raise InputError(
            f"{results}: is no sweep's results, since plan/ in it has no manifest-*.json; run "
            "snakemake, which plans"
        )
    return found


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    aged = [(stamp[1], path) for path in paths if (stamp := _stamp(path)) is not None]
    return [path for _, path in sorted(aged, reverse=True)]


def _stamp(path: Path) -> Stamp | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


class Results:
    """A results folder, looked at again and again; what has not changed is not read again."""

    def __init__(self, root: Path) -> None:
        """``root`` is the folder that holds ``results``."""
        self.root = root
        self._manifest: tuple[Path, Stamp | None, Manifest] | None = None
        self._ended: dict[str, tuple[Stamp, EndedRun]] = {}
        self._kinds: dict[str, str | None] = {}

    def look(self) -> Standing:
        """Read what has changed, and return how the sweep stands.

        Raises:
            InputError: The manifest is missing or is none.
            OSError: The manifest cannot be read.
        """
        path = find_manifest(self.root)
        manifest = self._read_manifest(path)
        progress = self._read_progress()
        files = {run: str(run.path(Path())) for run in manifest.runs}
        ended = {run: one for run in manifest.runs if (one := self._read_ended(run, files[run]))}
        results = {files[run]: self._ended[files[run]][0] for run in ended}
        told = self._tell(manifest.runs, ended, progress)
        return Standing(path, results, self._stamp_others(path), told)

    def _read_manifest(self, path: Path) -> Manifest:
        stamp = _stamp(path)
        if self._manifest is None or self._manifest[:2] != (path, stamp):
            self._manifest = (path, stamp, read_manifest(path))
        return self._manifest[2]

    def _read_progress(self) -> Progress | None:
        try:
            return Progress(self.root / PLAN / "progress.jsonl")
        except (OSError, ValueError):
            return None

    def _read_ended(self, run: PlannedRun, name: str) -> EndedRun | None:
        stamp = _stamp(self.root / name)
        if stamp is None:
            self._ended.pop(name, None)
            return None
        known = self._ended.get(name)
        if known is None or known[0] != stamp:
            known = self._ended[name] = (stamp, _read_result(self.root, run))
        return known[1]

    def _stamp_others(self, manifest: Path) -> dict[str, Stamp]:
        kinds = (VERDICT, LIMITS)
        paths = [one for k in kinds for one in (self.root / RESULTS).glob(f"{k.pattern}.json")]
        stamps = {str(one.relative_to(self.root)): _stamp(one) for one in [*paths, manifest]}
        return {name: stamp for name, stamp in stamps.items() if stamp is not None}

    def _kind_of(self, run: PlannedRun) -> str | None:
        """Return the model and method of a run, by its spec; None if it cannot be read."""
        if run.id not in self._kinds:
            try:
                one = read_spec(self.root / spec_path(run.id))
            except (InputError, OSError):
                return None
            self._kinds[run.id] = f"{one.model_name} {one.method}"
        return self._kinds[run.id]

    def _tell(
        self,
        runs: Iterable[PlannedRun],
        ended: dict[PlannedRun, EndedRun],
        progress: Progress | None,
    ) -> dict[str, Any]:
        begun = {one.began: one for one in progress.running()} if progress else {}
        goes_on = progress.goes_on() if progress else None
        # While a sweep goes on, it measures what it has planned, old results or not.
        due = set(progress.kinds) - set(progress.ended) if progress and goes_on else set()
        running, failed, remaining, done = [], [], [], 0
        for run in runs:
            name = run_name(run.id, run.instrument, run.replicate)
            one = ended.get(run)
            if name in begun:
                running.append((run, begun[name]))
            elif one is None or name in due:
                remaining.append(run)
            elif one.outcome == "ok":
                done += 1
            else:
                failed.append({"run": name, "outcome": one.outcome, "reason": one.reason})
        expected = Expected((run, self._kind_of(run), one.wall_s) for run, one in ended.items())
        present = [self._tell_running(run, one, expected) for run, one in running]
        counts = {"done": done, "failed": len(failed), "running": len(running)}
        counts["remaining"] = len(remaining)
        left_s, unknown = self._add_up(present, remaining, expected)
        return {
            "counts": counts | {"planned": sum(counts.values())},
            "running": present,
            "failed": failed[:_MOST_FAILURES],
            "left_s": left_s,
            "left_unknown": unknown,
            "goes_on": goes_on,
        }

    def _tell_running(self, run: PlannedRun, one: Began, expected: "Expected") -> dict[str, Any]:
        expected_s, basis = expected.of(run, self._kind_of(run))
        elapsed_s = max(0.0, time.time() - one.at_s)  # clocks of two machines may differ
        return {
            "run": one.began,
            "elapsed_s": elapsed_s,
            "expected_s": expected_s,
            "expected_from": basis,
        }

    def _add_up(
        self, running: list[dict[str, Any]], remaining: list[PlannedRun], expected: "Expected"
    ) -> tuple[float | None, int]:
        """Return the seconds left as if one run came after the other, and how many are unknown."""
        parts = [
            one["expected_s"] and max(0.0, one["expected_s"] - one["elapsed_s"]) for one in running
        ]
        parts += [expected.of(run, self._kind_of(run))[0] for run in remaining]
        known = [part for part in parts if part is not None]
        return (sum(known) if known or not parts else None), len(parts) - len(known)


class Expected:
    """How long runs take, from those of the same instrument that have ended."""

    def __init__(self, ended: Iterable[tuple[PlannedRun, str | None, float | None]]) -> None:
        """``ended`` has runs with model and method, and their time in seconds."""
        self._walls: dict[tuple[str, str | None], list[float]] = defaultdict(list)
        for run, kind, wall_s in ended:
            if wall_s is not None:
                for key in self._keys(run, kind):
                    self._walls[key].append(wall_s)

    @staticmethod
    def _keys(run: PlannedRun, kind: str | None) -> Iterator[tuple[str, str | None]]:
        """List what a run's time is looked up by, the most telling first."""
        yield run.instrument, run.id
        if kind is not None:
            yield run.instrument, kind
        yield run.instrument, None

    def of(self, run: PlannedRun, kind: str | None) -> tuple[float | None, str]:
        """Return the expected seconds of a run and what they rest on.

        They are the median of the runs under its instrument of its experiment; else of its model
        and method; else of all. None where none has ended.
        """
        for instrument, of in self._keys(run, kind):
            walls = self._walls.get((instrument, of))
            if walls:
                what = "this experiment" if of == run.id else of or "any experiment"
                count = "1 run" if len(walls) == 1 else f"median of {len(walls):,} runs"
                return statistics.median(walls), f"{count} of {what} under {instrument}"
        return None, f"no run under {run.instrument} has ended"


def _read_result(root: Path, run: PlannedRun) -> EndedRun:
    try:
        result = read_run(root, run.instrument, run.id, run.replicate)
    except ResultError as error:
        return EndedRun(DAMAGED, error.problem, None)
    except OSError as error:
        return EndedRun(DAMAGED, str(error), None)
    why = None if result.error is None else tell_failure(result.error)
    return EndedRun(result.outcome, why, result.wall_s)
