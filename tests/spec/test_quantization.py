"""What a config's ``quantization_config`` says, and what of it is refused."""

import pytest
from factory import make_experiment
from snapshots import assert_sentences, refusals_of

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


def test_what_is_not_known_or_mixes_samples_is_refused() -> None:
    assert_sentences("spec/quantization", refusals_of(read_quantization))


def test_none_is_what_ids_were_before() -> None:
    model = {"model": "hf:tiny-llama", "lora": {"rank": 2}}
    usual = make_experiment(**model)

    assert make_experiment(**model, quantization="none").id == usual.id
    assert make_experiment(**model, quantization=None).id == usual.id
    assert make_experiment(**model, quantization="nf4").id.startswith("hf-tiny-llama-lora2-nf4-")
