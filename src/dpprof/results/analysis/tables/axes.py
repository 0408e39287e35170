"""The columns that many tables share: the key of a run, and the axes of an experiment."""

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

from dpprof.experiments.config.architecture import PREFIX, Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.naming import RecurrentSizes
from dpprof.experiments.config.parallel import read_world_size
from dpprof.experiments.config.varying import spell_lengths
from dpprof.experiments.planning.planner import PlannedRun

RUN_KEY = ["experiment_id", "instrument", "replicate"]
_PATIENCE = {"timeout_s", "wait_for_idle_gpu_s", "busy_gpu"}
AXES = [name for name in Experiment.model_fields if name not in _PATIENCE]
"""The columns that distinguish experiments; timeouts and waiting times do not."""

BASELINE = "standard"
NOT_IN_BASELINE = {"method", "max_grad_norm", "noise_multiplier"}  # of no effect without privacy
SETTING = [name for name in AXES if name not in NOT_IN_BASELINE]  # equal where methods compete
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
        "lengths": None if experiment.lengths is None else spell_lengths(experiment.lengths),
        "padding": None if padding is None else padding.fraction,
        "quantization": experiment.base_format,
        "keep_logits": str(experiment.keep_logits).lower(),
        "parallel": None if experiment.parallel is None else experiment.parallel.text,
    }
    return {name: fields[name] for name in AXES} | texts


def name_model(row: Any) -> str:
    """Return the model of a row of axes, whether it has adapters, and on how many ranks it is."""
    base = row.get("quantization")
    over = f" over {base}" if isinstance(base, str) else ""
    adapters = f" with LoRA{over}" if isinstance(row.get("lora"), str) else ""
    ranks = row.get("parallel")
    return f"{row['model']}{adapters}" + (f", {ranks}" if isinstance(ranks, str) else "")


def name_size(row: Any) -> str:
    """Return the size of a row's samples: ``T = 128``, or ``224 x 224 pixels``."""
    size = _image_size(row)
    return f"T = {row['seq_len']:,}" if size is None else f"{size} x {size} pixels"


def size_cell(row: Any) -> str:
    """Return the size of a row's samples in a cell of a table: ``128``, or ``224 px``."""
    size = _image_size(row)
    return f"{row['seq_len']}" if size is None else f"{size} px"


def name_kind(row: Any) -> str:
    """Return how ranks share a training, as ``fsdp`` or ``ddp``; empty for one process."""
    parallel = row["parallel"]
    return parallel.rpartition(" x")[0] if isinstance(parallel, str) else ""


def name_speed(rows: Iterable[Any]) -> str:
    """Return what ``tokens_per_s`` counts in rows, as an image counts as one token."""
    are_images = {_image_size(row) is not None for row in rows}
    if are_images == {True}:
        return "samples/s"
    return "tokens or samples/s" if True in are_images else "tokens/s"


def _image_size(row: Any) -> int | None:
    """Return the height and width of images; None for text, of which a frame may hold NaN."""
    size = row.get("image_size")
    is_known = isinstance(size, Real) and not math.isnan(size)
    return int(float(size)) if is_known else None


def count_tokens(row: Any) -> float:
    """Return the tokens in the batches of all ranks of a row of axes, without padding.

    An image counts as one.
    """
    padding = row.get("padding")
    share = float(padding) if isinstance(padding, float) and not math.isnan(padding) else 0.0
    samples = row["batch_size"] * row.get("accumulation", 1)
    samples *= read_world_size(row.get("parallel"))
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
        return f"{PREFIX}{model.hf}" + ("" if model.task is None else f" ({model.task})")
    if isinstance(model, RecurrentSizes):
        return f"{model.kind}-V{model.vocab_size}-d{model.hidden}-L{model.layers}"
    return f"V{model.vocab_size}-d{model.d_model}-L{model.layers}-H{model.heads}"
