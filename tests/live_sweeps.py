"""Sweeps that are under way: a planned manifest, its progress, and results that come in."""

import json
import platform
import time
from pathlib import Path

from factory import make_experiment, make_manifest, write_synthetic

from dpprof.experiments.launch.progress import run_name
from dpprof.experiments.planning.artifacts import PLAN
from dpprof.experiments.planning.planner import Manifest

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
        self.manifest = root / manifest.path
        self.manifest.write_text(manifest.text)
        (root / manifest.due_path).write_text("due\n")
        self.progress = root / PLAN / "progress.jsonl"
        kinds = {self.name(at): f"custom {one.method}" for at, (one, _, _) in enumerate(runs)}
        self.progress.write_text(json.dumps(kinds) + "\n")
        self._append_began(None, OLDEST if goes_on else NO_PROCESS)

    def name(self, at: int) -> str:
        """Return the name of a run, by its place."""
        one, instrument, replicate = self.runs[at]
        return run_name(one.id, instrument, replicate)

    def begin(self, at: int, *, ago_s: float = 0.0, pid: int = OLDEST, host: str = "") -> None:
        """Say that a process has begun a run, one of this machine if of no other."""
        self._append_began(self.name(at), pid, ago_s, host)

    def end(self, at: int, wall_s: float = 1.0, **fields):
        """End a run with a result."""
        one, instrument, replicate = self.runs[at]
        fields |= {"instrument": instrument, "replicate": replicate, "wall_s": wall_s}
        result = write_synthetic(self.root, one, **fields)
        self._append({self.name(at): wall_s})
        return result

    def kill(self) -> None:
        """Let the sweep's Snakemake be dead."""
        text = self.progress.read_text()
        self.progress.write_text(text.replace(f'"pid": {OLDEST},', f'"pid": {NO_PROCESS},', 1))

    def _append_began(self, name: str | None, pid: int, ago_s: float = 0.0, host: str = "") -> None:
        host, at_s = host or platform.node(), time.time() - ago_s
        self._append({"began": name, "pid": pid, "host": host, "at_s": at_s})

    def _append(self, line: dict) -> None:
        with self.progress.open("a") as file:
            file.write(json.dumps(line) + "\n")


def plan_clean(root: Path, *methods: str, goes_on: bool = True) -> Sweep:
    """Plan a run under clean for each method."""
    runs = [(make_experiment(method=method), "clean", 0) for method in methods]
    return Sweep(root, *runs, goes_on=goes_on)
