"""What a config's ``quantization_config`` says, and what of it is refused."""

import re

import pytest
from factory import make_experiment

from dpprof.experiments.config.architecture import read_quantization

IN_4_BITS, IN_8_BITS = {"load_in_4bit": True}, {"load_in_8bit": True}
ZERO = {"llm_int8_threshold": 0.0}


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        (None, None),
        ({}, None),
        (IN_4_BITS, "fp4"),
        (IN_4_BITS | {"bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}, "nf4"),
        (
            IN_4_BITS | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            "nf4-double",
        ),
        (IN_8_BITS | ZERO, "int8"),
        (IN_8_BITS | ZERO | {"load_in_4bit": False}, "int8"),
    ],
)
def test_formats_are_read(stated, found) -> None:
    assert read_quantization(stated) == found


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ([1], "quantization_config must be a mapping"),
        ({"bits": 4}, "its weights are quantised by another method, and adapters"),
        ({"quant_method": "awq", "bits": 4}, "its weights are quantised by awq, and adapters are"),
        (IN_4_BITS | IN_8_BITS, "load_in_4bit or load_in_8bit in quantization_config"),
        (IN_8_BITS, "its llm_int8_threshold is 6.0: columns of a layer's input are then computed"),
        (IN_8_BITS | {"llm_int8_threshold": 3}, "its llm_int8_threshold is 3: columns"),
        (IN_8_BITS | ZERO | {"llm_int8_has_fp16_weight": True}, "keeps weights in 16 bits"),
        (IN_4_BITS | {"bnb_4bit_quant_type": "int4"}, "its bnb_4bit_quant_type is 'int4', and nf4"),
        (IN_4_BITS | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is bfloat16"),
        (IN_4_BITS | {"llm_int8_skip_modules": [1]}, "llm_int8_skip_modules must be a list of"),
    ],
)
def test_what_is_not_known_or_mixes_samples_is_refused(stated, said) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        read_quantization(stated)

    assert "\n" not in str(refusal.value)


def test_none_is_what_ids_were_before() -> None:
    model = {"model": "hf:tiny-llama", "lora": {"rank": 2}}
    usual = make_experiment(**model)

    assert make_experiment(**model, quantization="none").id == usual.id
    assert make_experiment(**model, quantization=None).id == usual.id
    assert make_experiment(**model, quantization="nf4").id.startswith("hf-tiny-llama-lora2-nf4-")
