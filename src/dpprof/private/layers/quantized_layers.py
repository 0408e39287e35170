"""Refuses quantised layers that mix samples, and runs the others, frozen beside what is trained.

nf4 and fp4 dequantise a weight and multiply with it: each row of the output depends on the same row
of the input. LLM.int8 quantises the input too, each row by its own largest element. But with a
threshold it computes a column in 16 bits wherever any row of the batch exceeds the threshold. Then
one more sample changes how all others are rounded, and the sum by more than one bound. So a
threshold is refused, at every forward. Other formats are refused by name: some scale their inputs
by the largest element of a batch, which no gradient shows.
"""

import re
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from dpprof.private.errors import UnsupportedError
from dpprof.private.refusals.coverage import class_names, trained_in
from dpprof.private.substitutes import substitute

_8BIT = "bitsandbytes.nn.modules.Linear8bitLt"
_4BIT = "bitsandbytes.nn.modules.Linear4bit"
_OTHER = re.compile(r"peft\.tuners\.lora\.(aqlm|awq|eetq|gptq|hqq|inc|te|torchao)|(torchao)\b")
"""Modules of Python with classes of layers and tensors in other formats."""

_PACKS = "support_avx512bf16_for_cpu"  # by which ``eval()`` packs a weight, for inference alone


def refuse_quantized(layer: nn.Module, *, is_sharded: bool = False) -> None:
    """Refuse a quantised layer that mixes samples, is trained, or is in a format not known here."""
    other = _find_other_format(layer)
    if other is not None:
        raise UnsupportedError(
            f"{type(layer).__name__} is quantised by {other}, of which it is not known whether "
            "samples share a scale; quantise by nf4, fp4 or int8 of bitsandbytes"
        )
    if not is_quantized(layer):
        return
    name = type(layer).__name__
    if trained_in(layer):
        raise UnsupportedError(
            f"{min(trained_in(layer))} of {name} is trained, and a layer with a quantised weight "
            "has no per-sample gradient; freeze it, and train adapters beside it"
        )
    if is_sharded:
        raise UnsupportedError(
            f"{name} loses the scales of its weight under fully_shard; train quantised models with "
            "DistributedDataParallel"
        )
    threshold = getattr(getattr(layer, "state", None), "threshold", 0.0)
    if threshold:
        raise UnsupportedError(
            f"{name} has a threshold of {threshold}: columns of its input are computed in another "
            "way if any sample of the batch exceeds it, so samples depend on each other; quantise "
            "with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
        )


def is_quantized(layer: nn.Module) -> bool:
    """Tell whether a layer is one of bitsandbytes with a quantised weight."""
    return not {_8BIT, _4BIT}.isdisjoint(class_names(layer))


def run_quantized(layer: Any, *inputs: Tensor) -> Tensor:
    """Run a quantised layer as it is, and in ``eval()`` without packing its weight.

    ``RuntimeError``: it was packed before, and gives no gradients; ``UnsupportedError``: it mixes.
    """
    refuse_quantized(layer)
    original = layer.original
    if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
        raise RuntimeError(
            f"the weight of {original.__name__} was packed for inference, by a forward in eval() "
            "on this CPU, and bitsandbytes computes no gradients with it; load the model again, "
            "and make the Clipping before you evaluate"
        )
    packs = getattr(layer, _PACKS, None)
    with nullcontext() if packs is None else substitute(layer, _PACKS, value=False):
        y: Tensor = original.forward(layer, *inputs)
    return y


def _find_other_format(layer: nn.Module) -> str | None:
    """Return how a layer, its parameters or its model are quantised, if not by bitsandbytes."""
    method = vars(layer).get("quantization_method")  # of a model of transformers
    method = getattr(method, "value", method)
    if method not in (None, "bitsandbytes"):
        return str(method)
    own = (type(parameter) for parameter in layer._parameters.values() if parameter is not None)  # noqa: SLF001
    for kind in (type(layer), *own):
        match = _OTHER.match(kind.__module__)
        if match is not None:
            return match[1] or match[2]
    return None
