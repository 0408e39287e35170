"""Quantised bases: what transformers would load, the bytes of each format, and what is refused."""

import sys

import pytest
import torch
from quantized_models import bitsandbytes, make_qlora, quantized_layers
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from dpprof.predict.memory.fake_tensors import fake_tensors
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.losses import find_known_head
from dpprof.subjects.models.blocks import find_blocks
from dpprof.subjects.models.build import build_model
from dpprof.subjects.models.quantized import (
    count_elements,
    follow_weights,
    import_bitsandbytes,
    is_quantized,
    scales_of,
)

FORMATS = ["nf4", "nf4-double", "fp4", "fp4-double", "int8"]
BLOCK, MAP = 64, 256
"""Elements with one scale, and the values of an 8-bit number."""


def loaded(quantization: str, folder) -> nn.Module:
    """Load the float weights of the same model as users do."""
    torch.manual_seed(0)
    build_model(make_qlora("llama", None, lora=None)).model.save_pretrained(folder)
    kind, _, double = quantization.partition("-")
    options = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": bool(double)}
    settings = BitsAndBytesConfig(load_in_4bit=True, **options)
    if quantization == "int8":
        settings = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings, device_map="cpu", dtype=torch.float32
    )


@pytest.mark.parametrize(
    "quantization",
    [
        "nf4-double",
        "int8",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("nf4", "fp4", "fp4-double")),
    ],
)
def test_a_base_is_what_transformers_loads(quantization, tmp_path) -> None:
    """The same layers, with the same bytes, where both begin with the same float weights."""
    theirs = loaded(quantization, tmp_path)
    torch.manual_seed(0)
    ours = build_model(make_qlora("llama", quantization)).model
    found = {name.removesuffix(".base_layer"): one for name, one in quantized_layers(ours).items()}
    expected = quantized_layers(theirs)

    assert len(found) == 7 * 2
    assert found.keys() == expected.keys()
    for name, layer in found.items():
        other = expected[name]
        assert type(layer.weight) is type(other.weight)
        assert torch.equal(layer.weight, other.weight)
        pairs = zip(scales_of(layer), scales_of(other), strict=True)
        assert all(torch.equal(one, another) for one, another in pairs)
    frozen = [p for p in ours.parameters() if not (p.requires_grad or is_quantized(p))]
    assert {p.dtype for p in frozen} == {torch.float32}


@pytest.mark.parametrize("quantization", FORMATS)
def test_the_bytes_of_each_format(quantization) -> None:
    model = build_model(make_qlora("llama", quantization))
    for layer in quantized_layers(model).values():
        rows, columns = layer.out_features, layer.in_features
        elements = rows * columns
        scales = sum(one.nbytes for one in scales_of(layer))
        blocks = elements // BLOCK
        assert count_elements(layer.weight) == elements
        if quantization == "int8":
            assert layer.weight.nbytes == elements
            assert scales == 4 * rows
            continue
        assert layer.weight.nbytes == elements // 2
        levels = 4 * 16
        # Scales in 8 bits, a float32 for each 256 of them, their mean, and their map.
        double = blocks + 4 * -(-blocks // 256) + 4 + 4 * MAP
        assert scales == levels + (double if quantization.endswith("double") else 4 * blocks)


def test_weights_are_quantised_in_the_dtype_that_is_computed_in() -> None:
    for dtype in ("float32", "bfloat16"):
        layers = quantized_layers(build_model(make_qlora("llama", "nf4", dtype=dtype)))
        for layer in layers.values():
            assert layer.weight.quant_state.dtype is getattr(torch, dtype)
            assert layer.compute_dtype is getattr(torch, dtype)


def test_a_config_that_says_so_is_quantised_as_it_says() -> None:
    stated = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}
    stated |= {"llm_int8_skip_modules": ["lm_head", "gate_proj"]}
    model = {"hf": "tiny-llama", "quantization_config": stated}
    experiment = make_qlora("llama", None, model=model)
    found = quantized_layers(build_model(experiment))

    assert experiment.base_format == "nf4"
    assert len(found) == 6 * 2
    assert not any("gate_proj" in name for name in found)


def test_a_head_that_is_quantised_is_not_run_in_chunks() -> None:
    stated = {"load_in_4bit": True, "llm_int8_skip_modules": []}
    model = {"hf": "tiny-llama", "quantization_config": stated}
    experiment = make_qlora("llama", None, model=model, head="chunked")

    with pytest.raises(
        UnsupportedError,
        match=r"needs a torch.nn.Linear, and the head is a bitsandbytes.*Linear4bit",
    ):
        find_known_head(build_model(experiment), experiment)


def test_blocks_of_a_quantised_model_are_equal() -> None:
    blocks = find_blocks(make_qlora("llama", "nf4-double"))

    assert blocks.count == 2
    assert blocks.trained_bytes == find_blocks(make_qlora("llama", None)).trained_bytes


def test_other_parameters_may_be_in_16_bits() -> None:
    fields = {"dtype": "bfloat16", "parameters_dtype": "bfloat16"}
    for parameter in build_model(make_qlora("llama", "int8", **fields)).parameters():
        expected = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype is (torch.int8 if is_quantized(parameter) else expected)


def test_products_read_the_int8_weight_that_was_moved() -> None:
    """``Module.to`` sets a weight's data alone; products read what lies beside it."""
    model = build_model(make_qlora("llama", "int8"))
    weights = [one for one in model.parameters() if is_quantized(one)]
    assert weights
    for one in weights:
        one.data = one.data.clone()
    follow_weights(model)

    assert all(one.CB.data_ptr() == one.data_ptr() for one in weights)
    assert all(one.SCB.device == one.device for one in weights)


def test_without_bitsandbytes_it_is_unsupported_in_a_sentence(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    import_bitsandbytes.cache_clear()
    with pytest.raises(UnsupportedError, match=r"need dpprof\[quantization\]: ") as refusal:
        build_model(make_qlora("llama", "nf4"))
    monkeypatch.undo()

    assert "\n" not in str(refusal.value)
    assert import_bitsandbytes() is bitsandbytes


def test_a_quantised_weight_is_not_trained() -> None:
    with fake_tensors(), pytest.raises(UnsupportedError, match="asks for quantised weights, which"):
        build_model(make_qlora("llama", "nf4", trainable="q_proj"))
