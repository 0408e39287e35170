"""Synthetic experiments and results for tests; nothing here was measured."""

from pathlib import Path
from typing import Any

from dpprof.experiment import Experiment
from dpprof.planning import Manifest, PlannedRun
from dpprof.result import Attempt, Failure, Result, result_path, write_result

MICRO = {"vocab_size": 16, "d_model": 8, "layers": 1, "heads": 2}


def make_experiment(**fields: Any) -> Experiment:
    """Make a valid experiment; what is not given is small."""
    usual = {"model": MICRO, "method": "standard", "batch_size": 2, "seq_len": 4, "device": "cpu"}
    return Experiment.model_validate(usual | {"warmup_steps": 1, "timed_steps": 1} | fields)


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
    code_digest: str = "0" * 64,
    samplers: dict[str, str] | None = None,
    phases_s: dict[str, list[float]] | None = None,
    components: dict[str, int] | None = None,
) -> Result:
    """Write a result file as the supervisor would, with invented figures."""
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
        "time": {
            "step_s": step_s,
            "warmup_step_s": [9.0],
            "median_s": median,
            "phases_s": phases_s,
        },
        "throughput": {"tokens_per_s": 1.0, "samples_per_s": 1.0, "steps_per_s": 1.0},
    }
    return write_result(
        result_path(root, instrument, experiment.id, replicate),
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
                    | {"others_busy_cores": others_busy_cores}
                )
            ],
            "started_at": "2026-01-01T00:00:00+00:00",
            "wall_s": 1.5,
            "device": {"type": "cpu", "name": "synthetic cpu", "threads": 2},
            "provenance": {
                "host": {"hostname": "nowhere", "cores_logical": 4},
                "python": "3.11.0",
                "packages": {"torch": "0", "opacus": "0"},
                "git": {"commit": None, "dirty": None, "reason": "synthetic"},
            },
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
