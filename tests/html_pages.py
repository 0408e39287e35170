"""Synthetic result sets for the HTML report, and a browser to open it in."""

import base64
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from factory import (
    make_experiment,
    make_kernels,
    make_memory,
    make_predicted_time,
    write_runs,
)
from factory import write_synthetic_ceilings as write_ceilings

from dpprof.experiments.planning.planner import Manifest
from dpprof.experiments.records.ceilings import ceilings_path, device_name
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.tables.axes import RUN_KEY
from dpprof.results.analysis.tables.build import build_tables
from dpprof.results.report.content import build_document
from dpprof.results.report.page.write import write_page

MIB = 2**20
METHODS = ("standard", "flash-bk", "opacus-ghost", "opacus-hooks")


def hold(rank: int) -> list[tuple[str, str | None, str, str, int]]:
    """What a method holds at its peak: component, layer, operator, phase and bytes."""
    held = [("parameters", f"blocks.{at}", "empty", "setup", 3 * MIB + at) for at in range(4)]
    held += [
        ("gradients", "head", "mm", "backward", 2 * MIB),
        ("inputs", None, "empty", "setup", 96),
    ]
    if rank:
        layers = [None, "head", *(f"blocks.{at}" for at in range(4))]
        held += [
            ("per_sample_gradients", layer, op, "backward", rank * 10_007 * (at + 1))
            for at, layer in enumerate(layers)
            for op in ("bmm", "einsum")
        ]
        held += [("norm_samples", "head", "bmm", "clip", 8 * rank)]
    return held


def record(rank: int, more: int = 0) -> dict:
    """A recorded or predicted step whose peak is what ``hold`` says, and ``more``."""
    rows = [*hold(rank), *([("noise", "head", "normal", "noise", more)] if more else [])]
    return record_rows(rows, executed_flops=100 * (rank + 1))


def record_rows(rows: list[tuple[str, str | None, str, str, int]], **compute: int) -> dict:
    """A recorded step that holds these rows at its peak."""
    at_peak: dict[str, int] = {}
    for component, *_, size in rows:
        at_peak[component] = at_peak.get(component, 0) + size
    recorded = make_memory(at_peak, op="bmm", **compute)
    columns = dict(
        zip(("component", "layer", "op", "phase", "bytes"), zip(*rows, strict=True), strict=True)
    )
    recorded["memory"]["at_peak"]["holdings"] = columns | {"storages": [1] * len(rows)}
    return recorded


def write_results(root: Path, methods=METHODS, **failure) -> Manifest:
    """Write results of methods with times, recorded and predicted memory, and a trace."""
    runs = []
    for rank, method in enumerate(methods):
        one = make_experiment(method=method)
        step_s = (0.010 * (rank + 1), 0.011 * (rank + 1), 0.012 * (rank + 1))
        timed = {"step_s": step_s, "peak_allocated_bytes": 20 * MIB + rank * MIB}
        estimated = record(rank, more=512) | {"time": make_predicted_time(0.0105 * (rank + 1))}
        kernels = make_kernels(
            {("forward", "gemm"): 0.004 * (rank + 1), ("step", "optimizer"): 0.002}, idle_s=0.001
        )
        runs += [(one, "clean", timed | {"replicate": replicate}) for replicate in range(2)]
        runs += [
            (one, "memory", {"recorded": record(rank)}),
            (one, "estimate", {"recorded": estimated}),
            (one, "kernels", {"kernels": kernels}),
        ]
    if failure:
        runs.append((make_experiment(method="opacus-ew"), "clean", failure))
    return write_runs(root, *runs)


def tables_of(root: Path, manifest: Manifest):
    """Build the tables, with the ceilings of the synthetic CPU."""
    known = write_ceilings(root)
    path = ceilings_path(root, device_name(known.device))
    return build_tables(collect(manifest, root, partial=False, ceilings=[path]))


def write_html(root: Path, tables) -> Path:
    """Write the page and return its path."""
    (root / "results").mkdir(parents=True, exist_ok=True)
    write_page(build_document(tables, []), tables, root / "results")
    return root / "results" / "report.html"


def read_content(page: Path) -> Any:
    """Return what a page holds."""
    (packed,) = re.findall(r'id="content">(.*?)</script>', page.read_text(encoding="utf-8"))
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def list_steps(page: Path) -> list[tuple[str, str, int]]:
    """Return the recorded and predicted steps of a page, as (experiment id, instrument, replicate).

    In the page a step's number is its place.
    """
    columns = read_content(page)["peaks"]["columns"]
    return [*zip(*(columns[name] for name in RUN_KEY), strict=True)]


def find_chromium() -> str:
    """Return the system's Chromium; skip the test where there is none."""
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        pytest.skip("no Chromium here; .ci/run installs Debian's")
    return found
