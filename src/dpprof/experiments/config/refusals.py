"""Combinations of an experiment's keys that cannot be measured, refused in one sentence."""

import re
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from dpprof.experiments.config.architecture import PREFIX, Architecture
from dpprof.experiments.config.loops import LOOPS
from dpprof.experiments.config.optimizers import COUNTS_ON_HOST, IN_BACKWARD
from dpprof.experiments.config.target import device_of, spell_target
from dpprof.experiments.config.varying import refuse_variation
from dpprof.private.number_formats import SHORT, refuse_loss_scale

if TYPE_CHECKING:
    from dpprof.experiments.config.experiment import Experiment


INDEPENDENT = "independent"  # the strategy of noise that does not follow from past noise


def refuse_strategy(strategy: str) -> str:
    """Return a strategy of noise, or raise ``ValueError`` for what is none."""
    if re.fullmatch(rf"{INDEPENDENT}|(banded|bisr)-[1-9][0-9]{{0,4}}", strategy):
        return strategy
    raise ValueError(
        f"it must be {INDEPENDENT}, or banded or bisr with a number of bands, such as banded-8"
    )


def refuse_combinations(experiment: "Experiment") -> None:
    """Raise ``ValueError`` for an experiment whose keys contradict each other."""
    rules = (
        *(
            _in_execution,
            _in_checkpointing,
            _in_loop,
            _in_fine_tuning,
            _in_decoder,
            _in_packing,
            _in_quantization,
        ),
        *(_in_optimizer, _in_formats, refuse_variation),
    )
    for sentence in chain.from_iterable(rule(experiment) for rule in rules):
        raise ValueError(sentence)


def _is_sharded(experiment: "Experiment") -> bool:
    return experiment.parallel is not None and experiment.parallel.is_sharded


def _in_execution(experiment: "Experiment") -> Iterator[str]:
    target, device = experiment.target, experiment.device
    if target is not None and device != device_of(target):
        yield (
            f"target {spell_target(target)} requires device {device_of(target)}, "
            f"but device is {device}"
        )
    if experiment.execution == "graph" and device != "cuda":
        yield f"execution graph requires device cuda, but device is {device}"
    if experiment.execution == "graph" and experiment.noise_strategy != INDEPENDENT:
        yield (
            f"noise_strategy {experiment.noise_strategy} requires execution eager: its noise is "
            "not in a CUDA graph, and what that costs is not known yet"
        )
    for name, usual in (("execution", "eager"), ("head", "logits")):
        value = getattr(experiment, name)
        if value != usual and experiment.parallel is not None:
            yield f"{name} {value} requires one process, without parallel"
    if experiment.accumulation > 1:
        yield from _in_accumulation(experiment)
    if experiment.head == "chunked" and experiment.task != "causal-lm":
        yield f"head chunked requires task causal-lm, but the task is {experiment.task}"


def _in_accumulation(experiment: "Experiment") -> Iterator[str]:
    named = f"accumulation {experiment.accumulation}"
    if experiment.execution == "graph":
        yield f"{named} requires execution eager: a CUDA graph here is of a step of one batch"
    if experiment.optimizer in IN_BACKWARD:
        yield f"{named} requires an optimizer that waits for all batches, as adamw-8bit"


def _in_checkpointing(experiment: "Experiment") -> Iterator[str]:
    if experiment.checkpointed_share < 1 and experiment.checkpointing == "none":
        yield (
            f"checkpointed_share {experiment.checkpointed_share} requires checkpointing "
            "non-reentrant or reentrant"
        )


def _in_loop(experiment: "Experiment") -> Iterator[str]:
    loss, loop = experiment.loss, LOOPS[experiment.loop]
    named = f"loss {loss}" + (f", of loop {experiment.loop}," if loop.loss == loss else "")
    if loss == "labels" and not isinstance(experiment.model, Architecture):
        yield f"{named} requires a Hugging Face model, as {PREFIX}NAME"
    if experiment.use_cache and not isinstance(experiment.model, Architecture):
        yield f"use_cache true requires a Hugging Face model, as {PREFIX}NAME"
    if loss == "chunked-cross-entropy" and experiment.task != "causal-lm":
        yield f"{named} requires task causal-lm, but the task is {experiment.task}"
    if loss != "cross-entropy" and experiment.head != "logits":
        yield f"{named} requires head logits, but head is {experiment.head}"
    whole = experiment.head == "logits" and loss != "chunked-cross-entropy"
    if experiment.keep_logits and (not whole or experiment.parallel is not None):
        yield (
            "keep_logits requires head logits, a loss that is not in chunks, and one process; give "
            "keep_logits false"
        )


def _in_fine_tuning(experiment: "Experiment") -> Iterator[str]:
    if not isinstance(experiment.model, Architecture):
        for name in ("lora", "padding"):
            if getattr(experiment, name) is not None:
                yield f"{name} requires a Hugging Face model, as {PREFIX}NAME"
    if experiment.padding is not None and experiment.image_size is not None:
        yield "padding requires a model that reads text, and this one reads images"
    if experiment.trainable == "lora" and experiment.lora is None:
        yield "trainable lora requires lora, such as lora: {rank: 16}"
    lora = experiment.lora
    is_short = not experiment.autocast and experiment.parameters_dtype != "float32"
    if lora is not None and lora.ia3 and experiment.base_format is not None and is_short:
        yield (
            "ia3 over a quantised base requires autocast, or parameters_dtype float32: peft scales "
            "keys in float32 there, and attention takes one dtype"
        )
    if lora is None or not lora.use_dora:
        return
    if lora.dropout and experiment.method not in ("standard", "microbatch"):
        yield "use_dora requires dropout 0 with a private method: it would draw twice for a sample"
    if experiment.base_format is not None:
        yield "use_dora requires quantization none: over quantised weights it is not predicted"


def _in_decoder(experiment: "Experiment") -> Iterator[str]:
    if experiment.decoder_len is None:
        return
    if experiment.task != "seq2seq-lm":
        yield f"decoder_len requires task seq2seq-lm, but the task is {experiment.task}"
    if experiment.padding is not None:
        yield "decoder_len requires padding null, which pads encoder and decoder to seq_len"


def _in_packing(experiment: "Experiment") -> Iterator[str]:
    if experiment.padding is None or not experiment.padding.packed:
        return
    if experiment.method != "standard":
        yield (
            "padding packed requires method standard: a row of several documents has one "
            "gradient, and clipping needs each sample's; closest: a row for each, padded"
        )
    if experiment.padding.fraction:
        yield "padding packed requires fraction 0: packed rows are full"


def _in_quantization(experiment: "Experiment") -> Iterator[str]:
    stated = experiment.model.quantization if isinstance(experiment.model, Architecture) else None
    if None not in (stated, experiment.quantization) and stated != experiment.quantization:
        yield f"the model's quantization_config says {stated} already; leave quantization out"
    if experiment.base_format is None:
        return
    if not isinstance(experiment.model, Architecture):
        yield f"quantization requires a Hugging Face model, as {PREFIX}NAME"
    if experiment.lora is None:
        yield (
            f"quantization {experiment.base_format} requires lora, such as lora: {{rank: 16}}: a "
            "quantised weight cannot be trained"
        )
    if experiment.dtype == "float64":
        yield "quantization requires a dtype of at most 32 bits, and dtype is float64"
    if _is_sharded(experiment) and experiment.base_format == "int8":
        yield (
            "quantization int8 works with parallel ddp, and not with fsdp: shards of its weights "
            "lose their scales; use nf4, whose layers keep them"
        )


def _in_optimizer(experiment: "Experiment") -> Iterator[str]:
    optimizer = experiment.optimizer
    if optimizer in IN_BACKWARD:
        yield from _in_backward(experiment)
    if optimizer not in COUNTS_ON_HOST:
        return
    if experiment.execution == "graph":
        yield (
            f"optimizer {optimizer} counts its steps on the host, which a CUDA graph would not "
            "repeat; use adamw or sgd with execution graph"
        )
    if _is_sharded(experiment):
        yield (
            f"optimizer {optimizer} keeps states of whole parameters, and fsdp shards them; use "
            "adamw or sgd with fsdp"
        )


def _in_backward(experiment: "Experiment") -> Iterator[str]:
    named = f"optimizer {experiment.optimizer}"
    if experiment.method != "standard":
        yield (
            f"{named} requires method standard: a private gradient exists after the whole backward "
            "pass, when all samples' norms are known; closest: adamw"
        )
    if experiment.parallel is not None or experiment.loss_scale != 1:
        yield f"{named} requires one process, and loss_scale 1: it takes gradients as they come"
    if experiment.checkpointing == "reentrant":
        yield f"{named} requires checkpointing none or non-reentrant, which have one backward pass"


def _in_formats(experiment: "Experiment") -> Iterator[str]:
    dtype, trained = experiment.dtype, experiment.trained_dtype
    for name in ("parameters_dtype", "trained_dtype"):
        stored = getattr(experiment, name)
        if stored not in ("float32", dtype):
            yield f"{name} {stored} requires dtype {stored}, but dtype is {dtype}"
    if trained not in ("float32", experiment.parameters_dtype):
        yield f"trained_dtype {trained} requires parameters_dtype {trained}"
    if trained == "float16" and not experiment.optimizer.startswith("sgd"):
        yield (
            "trained_dtype float16 requires optimizer sgd: the second moments of AdamW and its "
            "epsilon vanish in float16, and parameters become NaN"
        )
    if not experiment.autocast:
        yield from _without_autocast(experiment)
    if experiment.loss_scale != 1 and dtype != "float16":
        yield f"loss_scale requires dtype float16, but dtype is {dtype}"
    refuse_loss_scale(experiment.loss_scale)


def _without_autocast(experiment: "Experiment") -> Iterator[str]:
    dtype = experiment.dtype
    if _is_sharded(experiment):
        yield "autocast false does not work with fsdp, which casts by its policy"
    if dtype not in SHORT:
        yield f"autocast false requires dtype {' or '.join(SHORT)}"
    # Over a quantised base what is not quantised may be in float32, as peft prepares it.
    if experiment.parameters_dtype != dtype and experiment.base_format is None:
        yield f"autocast false requires parameters_dtype {dtype}"
    if experiment.trained_dtype != dtype and experiment.trained != "lora":
        yield (
            f"autocast false requires trained_dtype {dtype}, or adapters that alone are "
            "trained: an operator takes operands of one dtype"
        )
