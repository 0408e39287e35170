"""What may take less memory, where nothing fits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.validation import spell
from dpprof.experiments.records.result import Result
from dpprof.results.analysis.advice.advice import BEST
from dpprof.results.analysis.tables.axes import BASELINE

_IN_16_BITS = {"dtype": "bfloat16"}
_REMEDIES: tuple[tuple[Mapping[str, str], Mapping[str, Any], Callable[[Experiment], bool]], ...] = (
    (
        _IN_16_BITS,
        _IN_16_BITS,
        lambda asked: asked.dtype in ("float32", "tf32", "float64") and asked.lora is None,
    ),
    (
        _IN_16_BITS | {"parameters_dtype": "bfloat16"},
        _IN_16_BITS | {"parameters_dtype": "bfloat16"},
        lambda asked: asked.lora is not None and asked.parameters_dtype != "bfloat16",
    ),
    (
        {"checkpointing": BEST},
        {"checkpointing": "non-reentrant"},
        lambda asked: asked.checkpointing == "none" and asked.image_size is None,
    ),
    (
        {"head": BEST},
        {"head": "chunked"},
        lambda asked: asked.head == "logits" and not asked.method.startswith("opacus"),
    ),
    (
        {"lora": "rank=16"},
        {"lora": {"rank": 16}},
        lambda asked: asked.lora is None and asked.trained == "all" and asked.task == "causal-lm",
    ),
    ({"quantization": "nf4"}, {"quantization": "nf4"}, lambda q: q.base_format is None),
    (
        {"world_sizes": "2 4 8"},
        {"parallel": {"kind": "fsdp", "world_size": 2}, "execution": "eager"},
        lambda asked: asked.parallel is None and asked.device == "cuda",
    ),
)
"""What may take less memory: how it is asked for, fields of an experiment that has it, and whether
it may help one that lacks it."""


def list_remedies(results: Sequence[Result]) -> list[str]:
    """Say what may take less memory, where that is all that keeps private methods from training."""
    private = [r for r in results if r.experiment.method != BASELINE] or results
    is_safe = [r.capacity is not None and r.capacity.safe_batch_size for r in private]
    lacking = [r.experiment for r in private if r.outcome == "oom" or r.capacity]
    if any(is_safe) or not lacking:
        return []
    asked = [experiment for experiment in lacking if experiment.lora is not None] or lacking
    remedies = [
        " ".join(f"{spell(name)} {value}" for name, value in options.items())
        for options, fields, helps in _REMEDIES
        if any(map(helps, asked)) and all(_accepts(e, fields) for e in asked)
    ]
    return [f"What may take less memory: {', '.join(remedies)}."] if remedies else []


def _accepts(experiment: Experiment, fields: Mapping[str, Any]) -> bool:
    try:
        Experiment.model_validate({**experiment.model_dump(mode="json"), **fields})
    except ValidationError:
        return False
    return True
