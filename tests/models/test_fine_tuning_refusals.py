"""What cannot be fine-tuned is refused in a sentence, wherever it is found."""

from collections.abc import Callable
from typing import Any

import pytest
from factory import make_experiment
from pydantic import ValidationError

from dpprof.predict.capacity import measure
from dpprof.predict.memory.fake_tensors import fake_tensors
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.models.build import build_model

LORA = {"lora": {"rank": 4, "target_modules": ["q_proj"]}}
NF4 = {"model": "hf:tiny-llama", **LORA, "quantization": "nf4"}
GPTQ = {"hf": "tiny-llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
SMALL_CARD = {"device": "cuda", "target": "l4", "memory_limit_bytes": "4KiB", "seq_len": 8}


def build(**fields: Any) -> None:
    with fake_tensors():
        build_model(make_experiment(**fields))


def capacity(**fields: Any) -> None:
    measure(make_experiment(**fields), lambda _: None)


Refused = tuple[Callable[..., Any], dict[str, Any], type[Exception], str]
REFUSED: dict[str, Refused] = {
    "a quantised weight is trained": (
        *(build, {**NF4, "trainable": "q_proj"}, UnsupportedError),
        "asks for quantised weights, which cannot be trained",
    ),
    "a quantised model without adapters": (
        *(make_experiment, {**NF4, "lora": None}, ValidationError),
        "quantization nf4 requires lora",
    ),
    "LoRA over another format": (
        *(make_experiment, {"model": GPTQ, **LORA}, ValidationError),
        "its weights are quantised by gptq",
    ),
    "states of 8 bits under fsdp": (
        *(make_experiment, {"optimizer": "adamw-8bit", "parallel": "kind=fsdp,world_size=2"}),
        *(ValidationError, "adamw-8bit keeps states of whole parameters"),
    ),
    "states of 8 bits in a graph": (
        *(make_experiment, {"optimizer": "adamw-8bit", "execution": "graph", "device": "cuda"}),
        *(ValidationError, "counts its steps on the host"),
    ),
    "a scale that rounds": (
        *(make_experiment, {"dtype": "float16", "loss_scale": 1000}, ValidationError),
        "loss_scale must be a power of two",
    ),
    "a card smaller than the base": (
        *(capacity, {**NF4, "method": "flash-bk", **SMALL_CARD}, MemoryError),
        r"needs .* for one sample .* its parameters alone take .*, or take a larger card",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fine_tuned_is_refused_in_a_sentence(case) -> None:
    call, fields, error, why = REFUSED[case]
    with pytest.raises(error, match=why):
        call(**fields)
