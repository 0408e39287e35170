"""Builds every table: tidy rows, all in bytes and seconds."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any, BinaryIO

import pandas as pd

from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.planning.planner import PlannedRun
from dpprof.experiments.records.ceilings import Ceilings, device_name
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.terms import COMPONENTS, OUTCOMES
from dpprof.results.analysis.advice.advice import list_advice
from dpprof.results.analysis.advice.budget import Planned, list_budget, list_noise
from dpprof.results.analysis.collection import Collected
from dpprof.results.analysis.groups import Noise, group_runs, sent_bytes
from dpprof.results.analysis.standings import list_verification
from dpprof.results.analysis.tables.axes import axes_of, key_of
from dpprof.results.analysis.tables.columns import TABLES
from dpprof.results.analysis.tables.experiments import (
    compare_with_standard,
    list_experiments,
    list_instrument_overhead,
    list_settings,
    tabulate_methods,
)
from dpprof.results.analysis.tables.findings import find_caveats
from dpprof.results.analysis.tables.frames import make_frame, pick, write_frame
from dpprof.results.analysis.tables.records import list_kernels, list_memory


def build_tables(collected: Collected, planned: Planned | None = None) -> dict[str, pd.DataFrame]:
    """Return every table, by file stem; ``TABLES`` declares them.

    The table ``timeline`` is empty where ``collect`` has dropped the timelines.

    ``planned`` is the config's privacy budget, with the noise that it asks for.
    """
    groups = group_runs(collected)
    noise = Noise(groups)
    standard = compare_with_standard(groups, noise)
    experiments = (group.experiment for group in groups)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run, result in collected.runs:
        rows["runs"].append(_run_row(run, result, collected))
        rows["timeline"] += list_instants(run, result)
        for name, row in _list_parts(run, result):
            rows[name].append(key_of(run) | row)
    rows |= list_memory(collected, groups) | list_kernels(collected)
    rows |= {
        "missing": [
            key_of(run) | {"method": run.method, "reason": reason}
            for run, reason in collected.missing.items()
        ],
        "experiments": list_experiments(groups, standard, collected.standings),
        "settings": list_settings(groups, standard, noise),
        "outcomes": _list_outcomes(collected),
        "instrument_overhead": [*list_instrument_overhead(groups)],
        "advice": list_advice(collected),
        "budget": list_budget(collected, planned) if planned else [],
        "noise": list_noise(planned) if planned else [],
        "verification": list_verification(experiments, collected.standings),
        "ceilings": [*_list_ceilings(collected.ceilings)],
    }
    tables = {name: make_frame(name, rows[name]) for name in TABLES}
    tables["ceilings"] = tables["ceilings"].astype({"size": "Int64"})
    tables["methods"] = tabulate_methods(tables["experiments"])
    findings = find_caveats(collected, tables, planned.privacy if planned else None)
    tables["findings"] = make_frame("findings", (finding._asdict() for finding in findings))
    return tables


def _run_row(run: PlannedRun, result: Result, collected: Collected) -> dict[str, Any]:
    error, memory, provenance = result.error, result.memory, result.provenance
    host, packages, git = (provenance.get(key, {}) for key in ("host", "packages", "git"))
    failure = ("kind", "phase", "message", "requested_bytes", "log")
    parts = (result.model, result.throughput, memory, result.energy, result.attempts[-1], result)
    allocated, reserved = (
        memory and getattr(memory, f"peak_{kind}_bytes") for kind in ("allocated", "reserved")
    )
    return (
        pick("runs", *parts)
        | key_of(run)
        | {"sweeps": " ".join(run.sweeps)}
        | axes_of(result.experiment)
        | {f"error_{name}": error and getattr(error, name) for name in failure}
        | {
            "attempts": len(result.attempts),
            "median_step_s": result.time and result.time.median_s,
            "fragmentation": 1 - allocated / reserved if allocated and reserved else None,
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


def _list_parts(run: PlannedRun, result: Result) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows that are parts of a result, each with its table, without the run's key."""
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


def _list_outcomes(collected: Collected) -> list[dict[str, Any]]:
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
    return rows


def _list_ceilings(measured: Iterable[Ceilings]) -> Iterator[dict[str, Any]]:
    """Yield one row per device and figure.

    The figures are ``flops_per_s`` of each dtype (``size`` is the n of n x n matrices),
    ``bytes_per_s`` (``size`` is the bytes of the copied array) and ``launch_s``. A figure that was
    not measured has a ``reason``. ``source`` names the data sheet.
    """
    for ceilings in measured:
        sheet = find_by_device_name(ceilings.device.get("name"))
        device: dict[str, Any] = {"device": device_name(ceilings.device)}
        device["others_busy_cores"] = ceilings.others_busy_cores
        source, reasons, copies = sheet and sheet.source, ceilings.reasons, ceilings.bandwidth
        for dtype, product in ceilings.matmul.items():
            yield device | {
                "dtype": dtype,
                "figure": "flops_per_s",
                "measured": product and product.flops_per_s,
                "size": product and product.size,
                "datasheet": sheet and sheet.peak(dtype),
                "source": source,
                "reason": reasons.get(f"matmul.{dtype}"),
            }
        yield device | {
            "figure": "bytes_per_s",
            "measured": copies and copies.bytes_per_s,
            "size": copies and copies.array_bytes,
            "datasheet": sheet and sheet.bandwidth_bytes_per_s,
            "source": source,
            "reason": reasons.get("bandwidth"),
        }
        launch = {"measured": ceilings.launch_latency_s, "reason": reasons.get("launch_latency_s")}
        yield device | {"figure": "launch_s"} | launch


def begin_timeline(file: BinaryIO) -> Callable[[PlannedRun, Result], None]:
    """Begin the table as a CSV file, and return what adds a run to it, so that no frame has all."""

    def write(rows: Iterable[dict[str, Any]], *, header: bool = False) -> None:
        frame = make_frame("timeline", rows)
        file.write(write_frame("timeline", frame, header=header).encode())

    write((), header=True)
    return lambda run, result: write(list_instants(run, result))


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
