"""Combinations of an experiment's keys that cannot be measured, refused in one sentence."""

from typing import TYPE_CHECKING

from dpprof.experiments.config.architecture import PREFIX, Architecture
from dpprof.experiments.config.target import device_of, spell_target
from dpprof.private.number_formats import SHORT, refuse_loss_scale

if TYPE_CHECKING:
    from dpprof.experiments.config.experiment import Experiment


def refuse_combinations(experiment: "Experiment") -> None:
    """Raise ``ValueError`` for an experiment whose keys contradict each other."""
    _refuse_other_device(experiment)
    _refuse_execution(experiment)
    _refuse_fine_tuning(experiment)
    _refuse_quantization(experiment)
    _refuse_optimizer(experiment)
    _refuse_number_formats(experiment)


def _refuse_other_device(experiment: "Experiment") -> None:
    target, device = experiment.target, experiment.device
    if target is not None and device != device_of(target):
        raise ValueError(
            f"target {spell_target(target)} requires device {device_of(target)}, "
            f"but device is {device}"
        )


def _refuse_execution(experiment: "Experiment") -> None:
    if experiment.execution == "graph" and experiment.device != "cuda":
        raise ValueError(f"execution graph requires device cuda, but device is {experiment.device}")
    for name, usual in (("execution", "eager"), ("head", "logits")):
        value = getattr(experiment, name)
        if value != usual and experiment.parallel is not None:
            raise ValueError(f"{name} {value} requires one process, without parallel")
    if experiment.head == "chunked" and experiment.task != "causal-lm":
        raise ValueError(f"head chunked requires task causal-lm, but the task is {experiment.task}")


def _refuse_fine_tuning(experiment: "Experiment") -> None:
    if not isinstance(experiment.model, Architecture):
        for name in ("lora", "padding"):
            if getattr(experiment, name) is not None:
                raise ValueError(f"{name} requires a Hugging Face model, as {PREFIX}NAME")
    if experiment.padding is not None and experiment.image_size is not None:
        raise ValueError("padding requires a model that reads text, and this one reads images")
    if experiment.trainable == "lora" and experiment.lora is None:
        raise ValueError("trainable lora requires lora, such as lora: {rank: 16}")


def _refuse_quantization(experiment: "Experiment") -> None:
    stated = experiment.model.quantization if isinstance(experiment.model, Architecture) else None
    if None not in (stated, experiment.quantization) and stated != experiment.quantization:
        raise ValueError(
            f"the model's quantization_config says {stated} already; leave quantization out"
        )
    if experiment.base_format is None:
        return
    if not isinstance(experiment.model, Architecture):
        raise ValueError(  # noqa: TRY004 (pydantic's way)
            f"quantization requires a Hugging Face model, as {PREFIX}NAME"
        )
    if experiment.lora is None:
        raise ValueError(
            f"quantization {experiment.base_format} requires lora, such as lora: {{rank: 16}}: a "
            "quantised weight cannot be trained"
        )
    if experiment.dtype == "float64":
        raise ValueError("quantization requires a dtype of at most 32 bits, and dtype is float64")
    if experiment.parallel is not None and experiment.parallel.is_sharded:
        raise ValueError(
            "quantization works with parallel ddp, and not with fsdp: shards of a quantised "
            "weight lose its scales"
        )


def _refuse_optimizer(experiment: "Experiment") -> None:
    if experiment.optimizer not in ("adamw-8bit", "adafactor"):
        return
    if experiment.execution == "graph":
        raise ValueError(
            f"optimizer {experiment.optimizer} counts its steps on the host, which a CUDA graph "
            "would not repeat; use adamw or sgd with execution graph"
        )
    if experiment.parallel is not None and experiment.parallel.is_sharded:
        raise ValueError(
            f"optimizer {experiment.optimizer} keeps states of whole parameters, and fsdp shards "
            "them; use adamw or sgd with fsdp"
        )


def _refuse_number_formats(experiment: "Experiment") -> None:
    for name in ("parameters_dtype", "trained_dtype"):
        stored = getattr(experiment, name)
        if stored not in ("float32", experiment.dtype):
            raise ValueError(
                f"{name} {stored} requires dtype {stored}, but dtype is {experiment.dtype}"
            )
    trained = experiment.trained_dtype
    if trained not in ("float32", experiment.parameters_dtype):
        raise ValueError(f"trained_dtype {trained} requires parameters_dtype {trained}")
    if trained == "float16" and experiment.optimizer != "sgd":
        raise ValueError(
            "trained_dtype float16 requires optimizer sgd: the second moments of AdamW and its "
            "epsilon vanish in float16, and parameters become NaN"
        )
    if not experiment.autocast:
        _refuse_without_autocast(experiment)
    if experiment.loss_scale != 1 and experiment.dtype != "float16":
        raise ValueError(f"loss_scale requires dtype float16, but dtype is {experiment.dtype}")
    refuse_loss_scale(experiment.loss_scale)
    if experiment.keep_logits and (experiment.head != "logits" or experiment.parallel is not None):
        raise ValueError("keep_logits requires head logits, and one process")


def _refuse_without_autocast(experiment: "Experiment") -> None:
    if experiment.parallel is not None and experiment.parallel.is_sharded:
        raise ValueError("autocast false does not work with fsdp, which casts by its policy")
    if experiment.dtype not in SHORT:
        raise ValueError(f"autocast false requires dtype {' or '.join(SHORT)}")
    if experiment.parameters_dtype != experiment.dtype:
        raise ValueError(f"autocast false requires parameters_dtype {experiment.dtype}")
    if experiment.trained_dtype != experiment.dtype and experiment.trained != "lora":
        raise ValueError(
            f"autocast false requires trained_dtype {experiment.dtype}, or adapters that alone are "
            "trained: an operator takes operands of one dtype"
        )
