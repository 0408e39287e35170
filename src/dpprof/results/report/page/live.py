"""The live page: the report of the results so far, written again while a sweep runs."""

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.launch.progress import Progress, format_duration, run_name
from dpprof.experiments.planning.artifacts import LIMITS, PLAN, RESULTS, VERDICT
from dpprof.experiments.planning.planner import read_manifest
from dpprof.results.analysis.advice.budget import Planned
from dpprof.results.analysis.collection import NO_RESULT, collect
from dpprof.results.analysis.selection import Tables
from dpprof.results.analysis.tables.build import build_tables
from dpprof.results.report.content import build_document
from dpprof.results.report.page.write import SweepStatus, embed_contents, render_page
from dpprof.system.console import printable, say
from dpprof.system.files import write_atomically

LIVE_PAGE = RESULTS / "live.html"

PAUSE_S = 10.0  # the least time from one page to the next
SHARE = 0.1  # the most of one core that making pages may take, on average

_NO_NOISE = (
    "the live page does not ask the accountants, which would wait for the sweep; the report that "
    "the sweep writes does"
)
_PROGRESS = PLAN / "progress.jsonl"

Stamps = Mapping[Path, tuple[int, int, int]]
"""What distinguishes two versions of each file: inode, time of its last change in ns, size."""


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
    manifest = next((path for path in ordered if path.is_file()), None)
    if manifest is None:
        raise InputError(
            f"{results}: is no sweep's results, since plan/ in it has no manifest-*.json; run "
            "snakemake, which plans"
        )
    return manifest


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    stamps = _stamp(paths)
    return sorted(stamps, key=lambda path: (stamps[path][1], path), reverse=True)


def _stamp(paths: Iterable[Path]) -> Stamps:
    stamps = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            stamps[path] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return stamps


class LivePage:
    """``results/live.html`` of the sweep in ``root``, which ``find_manifest`` may refuse."""

    def __init__(self, root: Path) -> None:
        find_manifest(root)
        self._root = root
        self._stamps: Stamps = {}
        self._report: tuple[Tables, str, str] | None = None
        self._problem: str | None = None

    def follow(self, pause_s: float = PAUSE_S) -> None:
        """Renew the page until the sweep ends, then write it once more as one that is final.

        A page that cannot be made, whatever a file holds, is tried again and ends nothing.

        Raises:
            InputError: The manifest was deleted or damaged.
            OSError: A file cannot be read or written.
        """
        try:
            while True:
                since_s = time.process_time()
                progress = read_progress(self._root)
                has_ended = progress is not None and progress.goes_on() is False
                self._try_to_renew()
                if has_ended:
                    return
                time.sleep(max(pause_s, (time.process_time() - since_s) / SHARE))
        finally:
            self._write(is_live=False)

    def _try_to_renew(self) -> None:
        try:
            self.renew()
        except (InputError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 (a file may hold anything)
            problem = f"{type(error).__name__}: {error}"[:1000]
            if problem != self._problem:
                say(f"the page was not renewed, and is tried again: {problem}")
            self._problem = problem
        else:
            self._problem = None

    def renew(self) -> bool:
        """Write the page where a file of the sweep has changed; return whether one has.

        Results that cannot be trusted are left out and listed, as in a partial report.
        """
        path = find_manifest(self._root)
        manifest = read_manifest(path)
        files = [run.path(self._root) for run in manifest.runs]
        limits = sorted((self._root / RESULTS).glob(f"{LIMITS.pattern}.json"))
        files += [*limits, *(self._root / RESULTS).glob(f"{VERDICT.pattern}.json")]
        stamps = _stamp([path, self._root / _PROGRESS, *files])
        if stamps == self._stamps:
            return False
        collected = collect(manifest, self._root, partial=True, ceilings=limits)
        noise = None if manifest.privacy is None else Planned(manifest.privacy, reason=_NO_NOISE)
        tables = build_tables(collected, noise)
        document = build_document(tables, [])
        content = embed_contents(document, tables, self._root / RESULTS)
        self._stamps, self._report = stamps, (tables, document.title, content)
        self._write(is_live=True)
        return True

    def _write(self, *, is_live: bool) -> None:
        if self._report is not None:
            tables, title, content = self._report
            status = describe_sweep(tables, read_progress(self._root), is_live=is_live)
            write_atomically(self._root / LIVE_PAGE, render_page(title, content, status))


def read_progress(root: Path) -> Progress | None:
    """Return the progress of the sweep that was started last; None if it cannot be read."""
    try:
        return Progress(root / _PROGRESS)
    except (OSError, ValueError):
        return None


def describe_sweep(tables: Tables, progress: Progress | None, *, is_live: bool) -> SweepStatus:
    """Return how many runs are done, failed, running and remaining, and how long they will take.

    A damaged result counts as failed.
    """
    runs, missing = tables["runs"], tables["missing"]
    is_ok, is_absent = runs["outcome"] == "ok", missing["reason"] == NO_RESULT
    running = {str(run.began): run for run in progress.running()} if progress else {}
    goes_on = progress.goes_on() if progress else None
    # While a sweep goes on, it measures all that it has planned, even where a result exists.
    due = set(progress.kinds) - set(progress.ended) if progress and goes_on else set()
    done = _name(runs[is_ok]) - running.keys() - due
    failed = (_name(runs[~is_ok]) | _name(missing[~is_absent])) - running.keys() - due
    planned = _name(runs) | _name(missing)
    remaining = planned - done - failed - running.keys()
    begun = sorted((run.at_s, name) for name, run in running.items() if name in planned)
    counts = f"{len(done):,} of {len(planned):,} runs done, {len(failed):,} failed, "
    counts += f"{len(begun):,} running, {len(remaining):,} remaining"
    lines = [counts, *(f"{name} runs since {_clock(at_s)}." for at_s, name in begun)]
    if goes_on and progress is not None:
        if not begun:
            lines.append(
                "Nothing is measured now: Snakemake plans, measures ceilings, verifies methods, or "
                "writes the report."
            )
        if begun or remaining:
            left_s = progress.seconds_left()
            left = "An unknown time" if left_s is None else f"About {format_duration(left_s)}"
            lines.append(f"{left} of measuring is left.")
    elif not remaining:
        lines.append("Every planned run has ended; the sweep's report is report.html.")
    elif goes_on is None:
        lines.append("Whether a sweep runs is unknown.")
    else:
        lines.append("No sweep runs; snakemake continues it.")
    renewal = "it is renewed while the sweep runs" if is_live else "it is not renewed any more"
    lines.append(f"This page was written at {_clock(time.time())}; {renewal}.")
    shown = tuple(map(printable, lines))
    return SweepStatus(is_live, len(done) + len(failed), len(planned), shown)


def _name(rows: pd.DataFrame) -> set[str]:
    columns = rows[["experiment_id", "instrument", "replicate"]]
    return {run_name(*row) for row in columns.itertuples(index=False)}


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
