"""The columns that many tables share: the key of a run, and the axes of an experiment."""

import math
from typing import Any

from dpprof.planning.planner import PlannedRun
from dpprof.spec.architecture import PREFIX, Architecture
from dpprof.spec.experiment import Experiment
from dpprof.spec.parallel import read_world_size

RUN_KEY = ["experiment_id", "instrument", "replicate"]
_PATIENCE = {"timeout_s", "wait_for_idle_gpu_s", "busy_gpu"}
AXES = [name for name in Experiment.model_fields if name not in _PATIENCE]
"""The columns that distinguish experiments; timeouts and waiting times do not."""

BASELINE = "standard"
NOT_IN_BASELINE = {"method", "max_grad_norm", "noise_multiplier"}
"""The axes that the non-private step does not depend on."""

SETTING = [name for name in AXES if name not in NOT_IN_BASELINE]
"""The axes that must be equal for methods to be compared."""

WITHOUT_BATCH = [name for name in SETTING if name != "batch_size"]
"""The axes of a setting with capacity results, which find batch sizes by themselves."""


def key_of(run: PlannedRun) -> dict[str, Any]:
    """Return a run's key as columns."""
    return {"experiment_id": run.id, "instrument": run.instrument, "replicate": run.replicate}


def axes_of(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment's axes as columns."""
    fields = experiment.model_dump(mode="json")
    padding = experiment.padding
    texts = {
        "model": model_text(experiment),
        "target": target_text(experiment),
        "lora": None if experiment.lora is None else experiment.lora.text,
        "padding": None if padding is None else padding.fraction,
        "parallel": None if experiment.parallel is None else experiment.parallel.text,
    }
    return {name: fields[name] for name in AXES} | texts


def name_model(row: Any) -> str:
    """Return the model of a row of axes, whether it has adapters, and on how many ranks it is."""
    adapters = " with LoRA" if isinstance(row.get("lora"), str) else ""
    ranks = row.get("parallel")
    return f"{row['model']}{adapters}" + (f", {ranks}" if isinstance(ranks, str) else "")


def count_tokens(row: Any) -> float:
    """Return the tokens in the batches of all ranks of a row of axes, without padding."""
    padding = row.get("padding")
    share = float(padding) if isinstance(padding, float) and not math.isnan(padding) else 0.0
    samples = row["batch_size"] * read_world_size(row.get("parallel"))
    return float(samples * row["seq_len"] * (1 - share))


def target_text(experiment: Experiment) -> str | None:
    """Return the target's name; for a mapping its main figures, as ``24GiB-100TF-2TBps``."""
    target = experiment.target
    if target is None or isinstance(target, str):
        return target
    fastest = max(target.flops_per_s.values()) / 1e12
    bandwidth = target.bandwidth_bytes_per_s / 1e12
    return f"{target.memory_bytes / 2**30:.4g}GiB-{fastest:.4g}TF-{bandwidth:.3g}TBps"


def model_text(experiment: Experiment) -> str:
    """Return the model's name; for a mapping its dimensions, as ``V1000-d64-L2-H4``."""
    model = experiment.model
    if isinstance(model, str):
        return model
    if isinstance(model, Architecture):
        return f"{PREFIX}{model.hf}"
    return f"V{model.vocab_size}-d{model.d_model}-L{model.layers}-H{model.heads}"
