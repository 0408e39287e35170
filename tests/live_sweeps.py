"""Sweeps that are under way: a planned manifest, its progress, and results that come in."""

import contextlib
import json
import platform
import threading
import time
from pathlib import Path

from factory import make_experiment, make_manifest, write_synthetic

from dpprof.launch.progress import run_name
from dpprof.planning.artifacts import PLAN, spec_path
from dpprof.planning.planner import Manifest
from dpprof.report.live.builder import Builder
from dpprof.report.live.server import Server, Watch

OLDEST = 1
"""A process that is older than every sweep, and alive."""

NO_PROCESS = 2**22 + 1
"""More than the kernel's largest number of a process."""


class Sweep:
    """A planned sweep of one replicate or several under one instrument or several."""

    def __init__(self, root: Path, *runs, goes_on: bool = True) -> None:
        """``runs`` are (experiment, instrument, replicate)."""
        self.root, self.runs = root, runs
        listed = [make_manifest((one, n), instrument=name).runs for one, name, n in runs]
        manifest = Manifest(runs=tuple(run for (run,) in listed))
        (root / PLAN).mkdir(parents=True)
        (root / manifest.path).write_text(manifest.text)
        (root / manifest.due_path).write_text("due\n")
        for one, _, _ in runs:
            path = root / spec_path(one.id)
            path.parent.mkdir(exist_ok=True)
            path.write_text(one.canonical + "\n")
        self._progress = root / PLAN / "progress.jsonl"
        kinds = {self.name(at): f"custom {one.method}" for at, (one, _, _) in enumerate(runs)}
        self._progress.write_text(json.dumps(kinds) + "\n")
        self._say_began(None, OLDEST if goes_on else NO_PROCESS)

    def name(self, at: int) -> str:
        """Return the name of a run, by its place."""
        one, instrument, replicate = self.runs[at]
        return run_name(one.id, instrument, replicate)

    def begin(self, at: int, *, ago_s: float = 0.0, pid: int = OLDEST, host: str = "") -> None:
        """Say that a process has begun a run, one of this machine if of no other."""
        self._say_began(self.name(at), pid, ago_s, host)

    def end(self, at: int, wall_s: float, **fields):
        """End a run with a result."""
        one, instrument, replicate = self.runs[at]
        fields |= {"instrument": instrument, "replicate": replicate, "wall_s": wall_s}
        result = write_synthetic(self.root, one, **fields)
        self._append({self.name(at): wall_s})
        return result

    def _say_began(self, name: str | None, pid: int, ago_s: float = 0.0, host: str = "") -> None:
        host, at_s = host or platform.node(), time.time() - ago_s
        self._append({"began": name, "pid": pid, "host": host, "at_s": at_s})

    def _append(self, line: dict) -> None:
        with self._progress.open("a") as file:
            file.write(json.dumps(line) + "\n")


def plan_clean(root: Path, *methods: str, goes_on: bool = True) -> Sweep:
    """Plan a run under clean for each method."""
    runs = [(make_experiment(method=method), "clean", 0) for method in methods]
    return Sweep(root, *runs, goes_on=goes_on)


@contextlib.contextmanager
def serving(root: Path, builder: Builder | None = None):
    """Serve a sweep on any port."""
    with contextlib.closing(Watch(root, builder)) as watch, Server(watch, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
