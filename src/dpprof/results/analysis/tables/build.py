"""Builds every table: tidy rows, all in bytes and seconds."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any, BinaryIO

import pandas as pd

from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.planning.planner import PlannedRun
from dpprof.experiments.records.ceilings import Ceilings, device_name
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.step_costs import Memory
from dpprof.experiments.records.terms import COMPONENTS, OUTCOMES
from dpprof.results.analysis.advice.budget import Planned
from dpprof.results.analysis.collection import Collected
from dpprof.results.analysis.groups import Noise, group_runs, sent_bytes
from dpprof.results.analysis.tables.advice import tabulate_advice, tabulate_budget, tabulate_noise
from dpprof.results.analysis.tables.axes import axes_of, key_of
from dpprof.results.analysis.tables.columns import TABLES
from dpprof.results.analysis.tables.experiments import (
    compare_with_standard,
    tabulate_experiments,
    tabulate_instrument_overhead,
    tabulate_methods,
    tabulate_settings,
)
from dpprof.results.analysis.tables.findings import find_caveats
from dpprof.results.analysis.tables.frames import make_frame, pick, write_rows
from dpprof.results.analysis.tables.kernels import tabulate_kernels
from dpprof.results.analysis.tables.memory import tabulate_memory
from dpprof.results.analysis.tables.verification import tabulate_verification

_PARTS = ("steps", "phases", "snapshots", "components", "samplers", "ranks", "communication")
"""The tables whose rows are parts of single results."""


def build_tables(collected: Collected, planned: Planned | None = None) -> dict[str, pd.DataFrame]:
    """Return every table, by file stem; ``TABLES`` declares them.

    The table ``timeline`` is empty where ``collect`` has dropped the timelines.

    ``planned`` is the config's privacy budget, with the noise that it asks for.
    """
    groups = group_runs(collected)
    noise = Noise(groups)
    standard = compare_with_standard(groups, noise)
    experiments = tabulate_experiments(groups, standard, collected.standings)
    recorded, kernels = tabulate_memory(collected, groups), tabulate_kernels(collected)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run, result in collected.runs:
        rows["runs"].append(_run_row(run, result, collected))
        for name, row in _list_parts(run, result):
            rows[name].append(key_of(run) | row)
    instants = (row for pair in collected.runs for row in list_instants(*pair))
    missing = (
        key_of(run) | {"method": run.method, "reason": reason}
        for run, reason in collected.missing.items()
    )
    return {
        **{name: make_frame(name, rows[name]) for name in ("runs", *_PARTS)},
        "timeline": make_frame("timeline", instants),
        "missing": make_frame("missing", missing),
        **recorded,
        **kernels,
        "experiments": experiments,
        "settings": tabulate_settings(groups, standard, noise),
        "methods": tabulate_methods(experiments),
        "outcomes": _outcomes(collected),
        "instrument_overhead": tabulate_instrument_overhead(groups),
        "advice": tabulate_advice(collected),
        "budget": tabulate_budget(collected, planned),
        "noise": tabulate_noise(planned),
        "verification": tabulate_verification(
            (group.experiment for group in groups), collected.standings
        ),
        "ceilings": tabulate_ceilings(collected.ceilings),
        "findings": find_caveats(
            collected,
            recorded["peaks"],
            recorded["costs"],
            kernels["kernels"],
            None if planned is None else planned.privacy,
        ),
    }


def _run_row(run: PlannedRun, result: Result, collected: Collected) -> dict[str, Any]:
    error, memory, provenance = result.error, result.memory, result.provenance
    host, packages, git = (provenance.get(key, {}) for key in ("host", "packages", "git"))
    failure = ("kind", "phase", "message", "requested_bytes", "log")
    parts = (result.model, result.throughput, memory, result.energy, result.attempts[-1], result)
    return (
        pick("runs", *parts)
        | key_of(run)
        | {"sweeps": " ".join(run.sweeps)}
        | axes_of(result.experiment)
        | {f"error_{name}": error and getattr(error, name) for name in failure}
        | {
            "attempts": len(result.attempts),
            "median_step_s": result.time and result.time.median_s,
            "fragmentation": memory and _fragmentation(memory),
            "host_read_bytes": result.host_io and result.host_io.bytes_read,
            "host_written_bytes": result.host_io and result.host_io.bytes_written,
            "device_name": result.device.get("name"),
            "hostname": host.get("hostname"),
            "python": provenance.get("python"),
            "torch": packages.get("torch"),
            "opacus": packages.get("opacus"),
            "git_commit": git.get("commit"),
            "git_dirty": git.get("dirty"),
            "code_is_current": tuple(key_of(run).values()) not in collected.outdated,
        }
    )


def _fragmentation(memory: Memory) -> float | None:
    """Return the share of the peak reserved memory that the peak allocated memory leaves unused."""
    allocated, reserved = memory.peak_allocated_bytes, memory.peak_reserved_bytes
    return 1 - allocated / reserved if allocated is not None and reserved else None


def _list_parts(run: PlannedRun, result: Result) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of ``_PARTS``, each with its table, without the run's key."""
    if (time := result.time) is not None:
        for stage, samples in (("warmup", time.warmup_step_s or []), ("timed", time.step_s)):
            for index, step_s in enumerate(samples):
                yield "steps", {"stage": stage, "index": index, "step_s": step_s}
        for phase, samples in (time.phases_s or {}).items():
            middle = median(samples) if samples else None
            ends = {"min_s": min(samples, default=None), "max_s": max(samples, default=None)}
            yield "phases", {"phase": phase, "median_s": middle} | ends
    for snapshot in result.memory.snapshots if result.memory else []:
        yield "snapshots", snapshot.model_dump(exclude={"components"})
        for component, size in (snapshot.components or {}).items():
            owner = {"component": component, "bytes": size}
            yield "components", {"snapshot": snapshot.name} | owner
    for layer, path in (result.samplers or {}).items():
        yield "samplers", {"method": run.method, "layer": layer, "path": path}
    for part in result.ranks or []:
        median_s = part.time and part.time.median_s
        others = {"median_step_s": median_s, "sent_bytes": sent_bytes(part.communication)}
        yield "ranks", pick("ranks", part, part.memory) | others
    for exchange in result.communication or []:
        yield "communication", axes_of(result.experiment) | exchange.model_dump()


def _outcomes(collected: Collected) -> pd.DataFrame:
    """Return outcome counts per method; the success rate covers the runs that have a result."""
    ended = Counter((run.method, result.outcome) for run, result in collected.runs)
    missing = Counter(run.method for run in collected.missing)
    rows = []
    for method in sorted(missing.keys() | {method for method, _ in ended}):
        counts = {name: ended[method, name] for name in OUTCOMES}
        runs = sum(counts.values())
        rate = counts["ok"] / runs if runs else None
        row = {"method": method, "runs": runs, "missing": missing[method], "success_rate": rate}
        rows.append(row | counts)
    return make_frame("outcomes", rows)


def tabulate_ceilings(measured: Iterable[Ceilings]) -> pd.DataFrame:
    """Return one row per device and figure.

    The figures are ``flops_per_s`` of each dtype (``size`` is the n of n x n matrices),
    ``bytes_per_s`` (``size`` is the bytes of the copied array) and ``launch_s``. A figure that was
    not measured has a ``reason``. ``source`` names the data sheet.
    """
    rows = [row for ceilings in measured for row in _ceilings_rows(ceilings)]
    return make_frame("ceilings", rows).astype({"size": "Int64"})


def _ceilings_rows(ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    measured = {
        "device": device_name(ceilings.device),
        "others_busy_cores": ceilings.others_busy_cores,
    }
    sheet = find_by_device_name(ceilings.device.get("name"))
    common = measured | {"source": sheet and sheet.source}
    for dtype, product in ceilings.matmul.items():
        yield common | {
            "dtype": dtype,
            "figure": "flops_per_s",
            "measured": product and product.flops_per_s,
            "size": product and product.size,
            "datasheet": sheet and sheet.peak(dtype),
            "reason": ceilings.reasons.get(f"matmul.{dtype}"),
        }
    copies = ceilings.bandwidth
    yield common | {
        "figure": "bytes_per_s",
        "measured": copies and copies.bytes_per_s,
        "size": copies and copies.array_bytes,
        "datasheet": sheet and sheet.bandwidth_bytes_per_s,
        "reason": ceilings.reasons.get("bandwidth"),
    }
    yield measured | {
        "figure": "launch_s",
        "measured": ceilings.launch_latency_s,
        "reason": ceilings.reasons.get("launch_latency_s"),
    }


_COLUMNS = list(TABLES["timeline"].columns)


class TimelineFile:
    """The table as a CSV file, to which runs are added; the same bytes as those of its frame.

    Args:
        file: The file to write to.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._add([_COLUMNS])

    def add(self, run: PlannedRun, result: Result) -> None:
        """Add the instants of a run; nothing where it has none."""
        self._add([row[name] for name in _COLUMNS] for row in list_instants(run, result))

    def _add(self, rows: Any) -> None:
        self._file.write(write_rows(rows).encode())


def list_instants(run: PlannedRun, result: Result) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run: one for each instant of a step, with bytes by component."""
    line = result.memory and result.memory.timeline
    # The timeline of a capacity is for another batch size than the experiment's.
    if not line or result.capacity:
        return
    for row, (ops, phase) in enumerate(zip(line.ops, line.phase, strict=True)):
        yield (
            key_of(run)
            | {"ops": ops, "phase": phase, "elapsed_s": line.elapsed_s and line.elapsed_s[row]}
            | {"op": line.op and line.op[row]}
            | dict.fromkeys(COMPONENTS, 0)
            | {component: sizes[row] for component, sizes in line.components.items()}
        )
