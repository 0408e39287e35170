"""Does a report on ten thousand results come out in time? Tables, figures and report.

The results are synthetic. The time is given as a multiple of importing torch and Opacus,
measured before and after in the same run.
"""

import argparse
import importlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dpprof.planning.planner import Manifest
from dpprof.spec import registry
from dpprof.system.console import say

ROOT = Path(__file__).resolve().parents[1]
CLAIM = 40
"""How many times as long as the import it may take."""

MIB = 2**20
REPLICATES = 2


def write_results(folder: Path, count: int) -> Path:
    """Write synthetic results and the manifest that lists them; returns the manifest's path."""
    sys.path.append(str(ROOT / "tests"))
    factory: Any = importlib.import_module("factory")
    methods = registry.names("methods")
    lengths = (64, 128, 256, 512)
    batches = range(1, 2 + count // (len(lengths) * len(methods) * REPLICATES))
    grid = itertools.product(batches, lengths, enumerate(methods), range(REPLICATES))
    runs = []
    for batch, length, (rank, method), replicate in itertools.islice(grid, count):
        experiment = factory.make_experiment(method=method, batch_size=batch, seq_len=length)
        step_s = 1e-4 * batch * length * (1 + rank) * (1 + replicate / 50)
        failed = (batch + rank) % 17 == 0
        factory.write_synthetic(
            folder,
            experiment,
            replicate=replicate,
            outcome="oom" if failed else "ok",
            step_s=(step_s, step_s * 1.1, step_s),
            peak_allocated_bytes=MIB * batch * (3 + rank),
            phases_s={"forward": [step_s], "backward": [2 * step_s], "step": [step_s]},
            samplers={"Linear": "grad sampler"},
        )
        runs += factory.make_manifest((experiment, replicate)).runs
        if replicate == 0:
            recorded = factory.make_memory({"parameters": 3 * MIB, "noise": MIB * batch})
            factory.write_synthetic(folder, experiment, instrument="estimate", recorded=recorded)
            runs += factory.make_manifest((experiment, 0), instrument="estimate").runs
    manifest = Manifest(runs=tuple(runs))
    path: Path = folder / manifest.path
    path.parent.mkdir(parents=True)
    path.write_text(manifest.text, encoding="utf-8")
    return path


def run(script: str, *options: str) -> float:
    """Run one of the workflow's scripts; returns its seconds."""
    start = time.perf_counter()
    command = [sys.executable, str(ROOT / "workflow" / "scripts" / script), *options]
    subprocess.run(command, check=True)
    return time.perf_counter() - start


def import_s() -> float:
    """Import torch and Opacus in a fresh process; returns its seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, opacus"], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=int, default=10_000, help="how many results of clean")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        manifest = write_results(folder, arguments.results)
        tables, output = folder / "results" / "tables", folder / "results"
        figures = registry.names("figures")
        yardstick = [import_s() for _ in range(3)]
        parts = {
            "tables": run("build_tables.py", f"--manifest={manifest}", f"--output-dir={tables}")
        }
        for name in figures:
            files = [f"--output={output}/figures/{name}.{kind}" for kind in ("png", "pdf", "json")]
            parts[name] = run("draw_figure.py", f"--figure={name}", f"--tables={tables}", *files)
        parts["report"] = run("build_report.py", f"--tables={tables}", f"--output-dir={output}")
        yardstick += [import_s() for _ in range(3)]
    unit = statistics.median(yardstick)
    for name, seconds in parts.items():
        say(f"{name}: {seconds:.1f} s, {seconds / unit:.1f} times the import")
    ratio = sum(parts.values()) / unit
    print(f"{arguments.results:,} results: {ratio:.1f} times importing torch and opacus")
    if ratio >= CLAIM:
        sys.exit(f"not below {CLAIM}")


if __name__ == "__main__":
    main()
