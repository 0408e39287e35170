"""Writes results that nobody measured, to see what tables and report of many cost."""

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

from dpprof.experiments.config import registry
from dpprof.experiments.planning.planner import Manifest

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
REPLICATES = 2


def write_results(folder: Path, count: int) -> Path:
    """Write results of clean and, for the first replicate of each experiment, of estimate.

    Args:
        folder: Which gets the folder ``results``.
        count: How many of clean.

    Returns:
        The path of the manifest that lists them.
    """
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
