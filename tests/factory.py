"""Synthetic experiments and results for tests; nothing here was measured."""

from pathlib import Path
from typing import Any

import pandas as pd

from dpprof.experiments.accounting.plan import AtEpsilon, NoisePlan, describe_noise
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.mechanisms import FLAT
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.planning.code_digest import verified_as
from dpprof.experiments.planning.planner import Manifest, PlannedRun
from dpprof.experiments.records.advice import StepParts, Stretch
from dpprof.experiments.records.ceilings import Ceilings, ceilings_path, device_name
from dpprof.experiments.records.reconciliation import JOINED
from dpprof.experiments.records.record import write_record
from dpprof.experiments.records.result import Attempt, Failure, Result, result_path
from dpprof.experiments.records.terms import COMPONENTS, EVIDENCE
from dpprof.experiments.records.verdict import TOLERANCE, Verdict, verdict_path
from dpprof.private.accounting.schedule import Schedule
from dpprof.results.analysis.advice.budget import Planned
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.tables.build import build_tables

Tables = dict[str, pd.DataFrame]
CPU = {"type": "cpu", "name": "synthetic cpu", "cores": 2, "threads": 2}
MICRO = {"vocab_size": 16, "d_model": 8, "layers": 1, "heads": 2}


def make_experiment(**fields: Any) -> Experiment:
    """Make a valid experiment; what is not given is small."""
    usual = {"model": MICRO, "method": "standard", "batch_size": 2, "seq_len": 4, "device": "cpu"}
    return Experiment.model_validate(usual | {"warmup_steps": 1, "timed_steps": 1} | fields)


def make_memory(
    at_peak: dict[str, int], *, phase: str = "backward", op: str = "mm", **compute: Any
) -> dict[str, Any]:
    """Invent what a timeline or an estimate tells of a step of ten operators.

    Args:
        at_peak: Bytes by component at the peak, before and after which half of each is alive.
        phase: Where the peak is.
        op: What makes it.
        compute: Figures of ``compute`` other than the usual 100 FLOPs, of which 50 are needed.
    """
    peak = sum(at_peak.values())
    evidence = dict.fromkeys(EVIDENCE, 0) | {"identity": peak - at_peak.get("unattributed", 0)}
    moved = {"read": 30, "written": 10}
    flops: dict[str, Any] = {"model_flops": 50, "executed_flops": 100, "other_flops": 7}
    flops |= {"dp_flop_multiplier": 2.0, "peak_flops_per_s": None, "roofline_step_s": None}
    unknown = dict.fromkeys(["mfu", "hfu", "peak_source", "reason"])
    by = {f"flops_by_{key}": {} for key in ("module", "component")}
    return {
        "memory": {
            "peak_allocated_bytes": peak,
            "first_step_peak_allocated_bytes": peak,
            "at_peak": {
                "components": dict.fromkeys(COMPONENTS, 0) | at_peak,
                "phase": phase,
                "module": "blocks.0",
                "op": op,
                "largest": [],
            },
            "timeline": {
                "ops": [0, 4, 10],
                "elapsed_s": None,
                "phase": ["forward", phase, "step"],
                "components": {
                    name: [size // 2, size, size // 2] for name, size in at_peak.items()
                },
            },
            "attribution": {
                "valid": None,
                "timeline_peak_bytes": peak,
                "allocator_peak_bytes": None,
                "gap_bytes": None,
                "evidence": evidence,
                "reason": JOINED,
            },
        },
        "compute": {"flops_by_phase": {phase: 100}, **by, **flops, **unknown, **compute},
        "io": {
            "bytes_read": 30,
            "bytes_written": 10,
            "arithmetic_intensity": 2.5,
            "by_phase": {phase: moved},
            "by_op_kind": {},
            "by_phase_and_op_kind": [
                {"phase": phase, "op_kind": op_kind, "ops": 1, "flops": flops, **moved}
                for phase, op_kind, flops in (("forward", "gemm", 4000), ("step", "optimizer", 10))
            ],
            "by_module": {},
            "by_component": {},
        },
    }


def make_held(sizes: dict[str, int], layer: str | None = "head", **fields: Any) -> dict[str, Any]:
    """Invent memory as ``make_memory``, with each component's holding at the peak, by ``mm``."""
    recorded, count = make_memory(sizes), len(sizes)
    recorded["memory"]["at_peak"]["holdings"] = {
        "component": list(sizes),
        "layer": [layer] * count,
        "op": ["mm"] * count,
        "phase": ["forward"] * count,
        "bytes": list(sizes.values()),
        "storages": [1] * count,
    }
    return recorded | fields


def make_capacity(step_s: float | None = 1.0, **fields: Any) -> dict[str, Any]:
    """Invent what the instrument ``capacity`` finds, and a time that may be 10 % off.

    Args:
        step_s: Of the batch of 8 that safely fits; None where no time is predicted. A fifth of it
            is noise and optimizer.
        fields: Other figures of ``capacity``.
    """
    capacity = {
        "budget_bytes": 1000,
        "batch_size": 10,
        "peak_bytes": 990,
        "next_peak_bytes": 1010,
        "limited_by": "memory",
        "extrapolated": False,
        "safe_share": 0.9,
        "safe_batch_size": 8,
        "safe_peak_bytes": 890,
        "stated_batch_size": 8,
        "estimates": {1: 500, 10: 990, 11: 1010},
    }
    compute = make_memory({}, executed_flops=200, model_flops=100, peak_flops_per_s=1e12)["compute"]
    time = None
    if step_s is not None:
        compute |= {"roofline_step_s": 0.5 * step_s}
        time = make_predicted_time(step_s)
    return {"capacity": capacity | fields, "compute": compute, "time": time}


def make_predicted_time(step_s: float) -> dict[str, Any]:
    """Invent what a prediction says of a step's time."""
    predicted = {"median": step_s, "low": step_s / 1.1, "high": step_s * 1.1}
    predicted |= {"without_update": 0.8 * step_s, "waiting_share": 0.0}
    predicted |= {"rests_on": {"interpolated": 0.75, "data sheet": 0.25}}
    return {"step_s": [], "predicted_step_s": predicted}


def make_parts(
    kernels: dict[str, float],
    update: dict[str, float] | None = None,
    host: float = 0.0,
    **fields: Any,
) -> StepParts:
    """Invent a step that waits for the longer of its kernels and its host."""
    each, updating = (
        Stretch(sum(some.values()), {(phase, kind): s for kind, s in some.items()}, 0.0, 0.0)
        for phase, some in (("backward", kernels), ("step", update or {}))
    )
    each = each._replace(host=host, seconds=max(each.seconds, host))
    known: dict[str, Any] = {"device": "h100", "method": "flash", "samples": 8, "spread": 0.1}
    known |= {"of_products": 0.1, "own": 1.0, "of_python": 0.0}
    return StepParts(**{**known, "each": each, "update": updating, **fields})


def make_noise(
    tokens_per_sample: float, epsilons: tuple[float, ...] = (8.0, 2.0), **fields: Any
) -> NoisePlan:
    """Invent the noise of a budget: batches of 64 in 100 steps, twice as large at half epsilon."""
    batches = [
        describe_noise(Schedule(100_000, size, 6400 // size), 0.5 * (size / 64) ** 0.25, None)
        for size in (32, 64, 128)
    ]
    known = [
        AtEpsilon(
            epsilon=epsilon,
            same_batch_noise_multiplier=0.5 * (epsilons[0] / epsilon) ** 0.5,
            batch_size=int(64 * epsilons[0] / epsilon),
            noise_multiplier=0.5 * epsilons[0] / epsilon,
            tokens=6400 * tokens_per_sample * epsilons[0] / epsilon,
            reason=None,
        )
        for epsilon in epsilons
    ]
    usual = {"tokens_per_sample": tokens_per_sample, "batches": batches, "batch_size": 64}
    return NoisePlan.model_validate(usual | {"epsilons": known} | fields)


PRIVACY = Privacy.model_validate(
    {"samples": 100_000, "tokens": 51_200, "epsilon": [8, 2], "delta": 1e-6, "price_per_hour": 2}
)
"""What ``make_noise`` is of, with samples of 8 tokens."""


def make_kernels(
    seconds: dict[tuple[str, str], float], *, idle_s: float = 0.0, **fields: Any
) -> dict[str, Any]:
    """Invent what a trace of one step tells.

    Args:
        seconds: By phase and op kind.
        idle_s: When nothing ran.
        fields: Other fields of ``Kernels``.
    """
    total_s = sum(seconds.values())
    by: tuple[dict[str, float], dict[str, float]] = {}, {}
    for key, part in seconds.items():
        for sums, name in zip(by, key, strict=True):
            sums[name] = sums.get(name, 0.0) + part
    return {
        "steps": 1,
        "step_s": total_s + idle_s,
        "total_s": total_s,
        "by_phase": by[0],
        "by_op_kind": by[1],
        "by_phase_and_op_kind": [
            {"phase": phase, "op_kind": op_kind, "seconds": part, "launches": 1.0}
            for (phase, op_kind), part in seconds.items()
        ],
        "other_share": by[1].get("other", 0.0) / total_s,
        "idle_s": idle_s,
        "waiting_s": None,
        "largest": [],
        "copies": {},
        "trace": "results/traces/x/r0/dpprof.pt.trace.json.gz",
        "trace_bytes": 1000,
        "trace_steps": 1,
        **fields,
    }


def write_synthetic(
    root: Path,
    experiment: Experiment,
    *,
    instrument: str = "clean",
    replicate: int = 0,
    outcome: str = "ok",
    step_s: tuple[float, ...] = (1.0,),
    peak_rss_bytes: int | None = 2**20,
    peak_allocated_bytes: int | None = None,
    peak_reserved_bytes: int | None = None,
    message: str = "it broke",
    attempts: int = 1,
    others_busy_cores: float | None = None,
    others_after: dict[str, Any] | None = None,
    code_digest: str = "0" * 64,
    samplers: dict[str, str] | None = None,
    nonfinite_samples: int | None = None,
    phases_s: dict[str, list[float]] | None = None,
    components: dict[str, int] | None = None,
    recorded: dict[str, Any] | None = None,
    kernels: dict[str, Any] | None = None,
    observed: dict[str, Any] | None = None,
    device: dict[str, Any] = CPU,
    provenance: dict[str, Any] | None = None,
    wall_s: float = 1.5,
) -> Result:
    """Write a result file as the supervisor would, with invented figures.

    Where there is no verdict on its method, one that it passed is written too.

    Args:
        recorded: Of ``make_memory``: what an instrument that records memory says instead of times.
        kernels: Of ``make_kernels``: what a trace tells.
        observed: What a step and its memory came to.
        device: Where it ran.
        provenance: What differs from the usual provenance.
    """
    if not verdict_path(root, verified_as(experiment), experiment.method).exists():
        write_synthetic_verdict(root, experiment)
    error = None
    if outcome != "ok":
        error = Failure(kind="SyntheticError", message=message, phase="backward", log="x.log")
    median = sorted(step_s)[len(step_s) // 2] if len(step_s) % 2 else sum(step_s) / 2
    measured: dict[str, Any] = {
        "model": {"parameters_total": 10, "parameters_trainable": 10, "parameters_bytes": 40},
        "memory": {
            "peak_rss_bytes": peak_rss_bytes,
            "peak_allocated_bytes": peak_allocated_bytes,
            "peak_reserved_bytes": peak_reserved_bytes,
            "snapshots": [
                {"name": "model_loaded", "rss_bytes": 5, "elapsed_s": 0.5},
                {"name": "after_backward", "elapsed_s": 0.6, "components": components},
            ],
        },
        "samplers": samplers,
        "nonfinite_samples": nonfinite_samples,
        "time": {
            "step_s": step_s,
            "warmup_step_s": [9.0],
            "median_s": median,
            "phases_s": phases_s,
        },
        "throughput": {"tokens_per_s": 1.0, "samples_per_s": 1.0, "steps_per_s": 1.0},
    }
    if recorded is not None:
        measured = {"model": measured["model"], "samplers": samplers, **recorded}
    measured |= {"kernels": kernels, "observed": observed}
    return write_record(
        result_path(root, instrument, experiment.id, replicate),
        Result,
        (measured if outcome == "ok" else {})
        | {
            "experiment_id": experiment.id,
            "experiment": experiment,
            "spec_digest": experiment.digest,
            "code_digest": code_digest,
            "instrument": instrument,
            "replicate": replicate,
            "outcome": outcome,
            "error": error,
            "attempts": [Attempt(outcome="crashed", wall_s=1.0)] * (attempts - 1)
            + [
                Attempt.model_validate(
                    {"outcome": outcome, "wall_s": 1.0, "error": error}
                    | {"others_busy_cores": others_busy_cores, "others_after": others_after}
                )
            ],
            "started_at": "2026-01-01T00:00:00+00:00",
            "wall_s": wall_s,
            "device": device,
            "provenance": {
                "host": {"hostname": "nowhere", "cores_logical": 4},
                "python": "3.11.0",
                "packages": {"torch": "0", "opacus": "0"},
                "git": {"commit": None, "dirty": None, "reason": "synthetic"},
            }
            | (provenance or {}),
        },
    )


def write_synthetic_verdict(
    root: Path,
    experiment: Experiment,
    passed: bool | None = True,
    *,
    reason: str | None = None,
    **fields: Any,
) -> Verdict:
    """Write a verdict on an experiment's method, with one case that came out alike."""
    model, method = verified_as(experiment), experiment.method
    errors = {"max_relative_error": 1e-16, "max_relative_error_of_norms": None}
    references = ["microbatch", "torch.func"]
    case = {"attention": experiment.attention, "batch_size": 4, "groups": 1, "sensitivity": 1.0}
    outcome = {True: "passed", False: "failed", None: "unknown"}[passed]
    told = {"reason": reason, "references": references, **errors}
    return write_record(
        verdict_path(root, model, method),
        Verdict,
        {
            "model": model,
            "method": method,
            "mechanism": FLAT,
            "passed": passed,
            "holes": [],
            "tolerance": TOLERANCE,
            "cases": [case | told | {"outcome": outcome}],
            "code_digest": "0" * 64,
            "wall_s": 1.0,
            "provenance": {},
            **told,
            **fields,
        },
    )


def write_synthetic_ceilings(
    root: Path, device: dict[str, Any] | None = None, **fields: Any
) -> Ceilings:
    """Write the ceilings of a device, the synthetic CPU's where none is given."""
    device = device or CPU
    repeated = {"seconds": 2.0, "median_s": 3.0, "repeats": 2}
    product = {"flops_per_s": 1000.0, "size": 10, "stopped": None}
    product |= {"samples": [repeated | {"size": 10}]}
    copies = {"bytes_per_s": 40.0, "array_bytes": 40, "stopped": None}
    copies |= {"samples": [repeated | {"array_bytes": 40}]}
    products = {"float32": product, "tf32": None, "bfloat16": product, "float64": product}
    return write_record(
        ceilings_path(root, device_name(device)),
        Ceilings,
        {
            "device": device,
            "matmul": products,
            "bandwidth": copies,
            "launch_latency_s": 0.001,
            "reasons": {"matmul.tf32": "synthetic"},
            "started_at": "2026-01-01T00:00:00+00:00",
            "wall_s": 1.0,
            "others_busy_cores": 0.0,
            "operators": None,
            "code_digest": "0" * 64,
            "provenance": {},
            **fields,
        },
    )


def make_manifest(*runs: tuple[Experiment, int], instrument: str = "clean") -> Manifest:
    """List runs of one instrument."""
    return Manifest(
        runs=tuple(
            PlannedRun(
                id=experiment.id,
                instrument=instrument,
                replicate=replicate,
                method=experiment.method,
                sweeps=("synthetic",),
            )
            for experiment, replicate in runs
        )
    )


def write_manifest(root: Path, manifest: Manifest) -> Path:
    """Write a manifest where planning does, and return its path."""
    path = root / manifest.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(manifest.text, encoding="utf-8")
    return path


def write_runs(root: Path, *runs: tuple[Experiment, str, dict[str, Any]]) -> Manifest:
    """Write runs, each an experiment, an instrument and its figures; return what lists them."""
    planned: list[PlannedRun] = []
    for experiment, instrument, fields in runs:
        write_synthetic(root, experiment, instrument=instrument, **fields)
        number = fields.get("replicate", 0)
        planned += make_manifest((experiment, number), instrument=instrument).runs
    return Manifest(runs=tuple(planned))


def tables_of_runs(
    root: Path,
    *runs: tuple[Experiment, str, dict[str, Any]],
    ceilings: dict[str, Any] | None = None,
    planned: Planned | None = None,
) -> Tables:
    """Write runs, as ``write_runs``, and build their tables.

    Args:
        root: Where to.
        runs: The runs.
        ceilings: Fields of the synthetic CPU's ceilings; None where nobody measured it.
        planned: The privacy budget, with its noise.
    """
    manifest, files = write_runs(root, *runs), []
    if ceilings is not None:
        known = write_synthetic_ceilings(root, **ceilings)
        files.append(ceilings_path(root, device_name(known.device)))
    return build_tables(collect(manifest, root, partial=False, ceilings=files), planned)
