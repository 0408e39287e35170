"""Quantised bases and small optimizer states: recorded memory, the estimate, and known answers."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from factory import make_experiment
from memory_steps import record_and_estimate, trace_call
from quantized_models import bitsandbytes, make_qlora, quantized_layers
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from dpprof.ask.estimate import format_estimate
from dpprof.experiments.records.result import Measurement
from dpprof.predict.estimate import estimate
from dpprof.predict.memory.events import Op
from dpprof.predict.memory.quantized_operators import optimizer_workspaces
from dpprof.subjects.models import quantized
from dpprof.subjects.models.build import build_model
from dpprof.subjects.models.quantized import import_bitsandbytes, scales_of

MODELS, METHODS = ("llama", "qwen2", "gemma2"), ("standard", "flash-bk", "flash")
BASES = [{"quantization": one} for one in ("nf4", "nf4-double", "int8")]
OPTIMIZERS = [{"optimizer": one} for one in ("adamw-8bit", "adafactor")]
IN_16_BITS = {"dtype": "bfloat16", "parameters_dtype": "bfloat16"}
ALL_IN_16_BITS = IN_16_BITS | {"trained_dtype": "bfloat16", "autocast": False}
PREPARED = {"dtype": "bfloat16", "autocast": False}
"""As peft prepares a model: what is not quantised computes in float32."""
QUICK = [
    ("llama", "flash-bk", {"quantization": "nf4", "optimizer": "adamw-8bit"} | ALL_IN_16_BITS),
    ("gemma2", "flash", {"quantization": "int8", "optimizer": "adafactor"}),
    ("llama", "flash-bk", {"optimizer": "paged-adamw-32bit"}),
]
PAGED = [{"optimizer": f"paged-adamw-{bits}bit"} for bits in (8, 32)]
SLOW = list(itertools.product(MODELS, METHODS, [*BASES, *OPTIMIZERS]))
SLOW += [
    ("llama", method, one | {"lora": None}) for method in METHODS for one in [*OPTIMIZERS, *PAGED]
]
SLOW += [
    ("llama", "flash-bk", base | more)
    for base in BASES
    for more in (IN_16_BITS, {"checkpointing": "non-reentrant"}, {"checkpointing": "reentrant"})
]
SLOW += [
    ("gemma2", method, base | formats)
    for method in METHODS
    for base in BASES
    for formats in (ALL_IN_16_BITS, PREPARED, IN_16_BITS | {"autocast": False})
]
SLOW += [
    ("llama", method, {"quantization": "nf4-double"})
    for method in ("per-layer", "microbatch", "opacus-hooks", "opacus-ghost", "opacus-functorch")
]
SLOW += [("gpt2", "flash-bk", base) for base in BASES]
SLOW += [
    ("llama", method, base | {"lora": "ia3"})
    for method in (*METHODS, "per-layer", "microbatch")
    for base in BASES
]
SLOW += [("llama", method, BASES[0] | {"lora": "ia3"} | IN_16_BITS) for method in METHODS]
SLOW += [("llama", method, BASES[0] | {"lora": "ia3"} | PREPARED) for method in METHODS]
SLOW += [("llama", "flash-bk", {"quantization": "nf4-double", "optimizer": "adamw-8bit"})]
SLOW += [
    ("llama", method, one)
    for method in ("opacus-hooks", "opacus-ghost", "opacus-functorch", "microbatch")
    for one in OPTIMIZERS
]


@pytest.mark.parametrize(
    ("model", "method", "fields"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_an_estimate_equals_what_is_recorded_and_who_owns_it_is_known(
    model, method, fields
) -> None:
    usual = {"seq_len": 24, "noise_multiplier": 0.1, "method": method, "quantization": None}
    real, fake = record_and_estimate(make_qlora(model, **usual | fields))

    assert fake.compute.flops_by_phase == real.compute.flops_by_phase
    assert fake.io == real.io
    guessed = real.memory.attribution.evidence["phase"]
    guessed += real.memory.at_peak.components["unattributed"]
    assert guessed <= 0.1 * real.memory.peak_allocated_bytes


def most(experiment) -> tuple[dict[str, int], Measurement]:
    found = estimate(experiment, lambda _: None)
    return {name: max(line) for name, line in found.memory.timeline.components.items()}, found


@pytest.mark.parametrize("quantization", ["nf4-double", "int8"])
def test_weights_scales_and_copies_are_in_the_books(quantization) -> None:
    experiment = make_qlora("llama", quantization, seq_len=24)
    layers = quantized_layers(build_model(experiment)).values()
    sizes, found = most(experiment)
    largest = max(one.in_features * one.out_features for one in layers)
    # Beside a copy lie its scales: of blocks of 64 of 4 bits, of rows of int8.
    rows = max(one.out_features for one in layers)
    scales = largest // 64 if quantization == "nf4-double" else rows

    assert sizes["quantization_scales"] == sum(t.nbytes for one in layers for t in scales_of(one))
    assert sizes["dequantized_weights"] == 4 * (largest + scales)
    assert found.model.unquantized_experts_bytes == 0
    assert found.model.parameters_total == sum(
        p.numel() for p in build_model(make_qlora("llama", None)).parameters()
    )


def test_experts_in_one_parameter_stay_as_they_are_and_the_first_line_says_so(tmp_path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    config = AutoConfig.for_model("mixtral", num_hidden_layers=2, **sizes, **heads)
    config.save_pretrained(tmp_path)
    fields = {"lora": "rank=2,target_modules=q_proj", "quantization": "nf4"}
    experiment = make_experiment(model=f"hf:{tmp_path}", seq_len=8, **fields)
    found = estimate(experiment, lambda _: None)
    experts = 2 * 4 * 3 * 64 * 128 * 4

    assert found.model.unquantized_experts_bytes == experts
    told = format_estimate(SimpleNamespace(**dict(found), experiment=experiment))
    assert "of fused experts are not quantised to nf4" in told.splitlines()[0]


def test_states_of_optimizers_take_the_bytes_that_they_state() -> None:
    parameters = list(build_model(make_qlora("llama", None, lora=None)).parameters())
    vocabulary = [p.numel() for p in parameters if p.numel() >= 4096]
    small = [p.numel() for p in parameters if p.numel() < 4096]
    assert vocabulary
    assert small

    # Two bytes an element and a float32 for each 256, twice; both maps; else two of float32.
    in_8_bits = sum(2 * n + 2 * 4 * -(-n // 256) for n in vocabulary) + 2 * 4 * 256
    expected = {"adamw-8bit": in_8_bits + sum(8 * n for n in small)}
    # A float32 for each row and column of a matrix, for each element of a vector, and a count.
    expected["paged-adamw-8bit"] = in_8_bits + sum(8 * n for n in small)
    expected["paged-adamw-32bit"] = sum(8 * p.numel() for p in parameters)
    # One byte an element and a float32 for each 256; both maps, of which it reads one; else one.
    expected["lion-8bit"] = sum(n + 4 * -(-n // 256) for n in vocabulary) + 2 * 4 * 256
    expected["lion-8bit"] += sum(4 * n for n in small)
    expected["adafactor"] = sum(4 * sum(p.shape) + 4 for p in parameters)
    for optimizer, nbytes in expected.items():
        experiment = make_qlora("llama", None, lora=None, optimizer=optimizer)
        assert most(experiment)[0]["optimizer_state"] == nbytes


def test_the_first_prediction_of_a_process_may_be_of_an_8_bit_optimizer() -> None:
    """Its map needs elements, which are computed before tensors are fake."""
    for cached in (import_bitsandbytes, quantized._find_dynamic_map):
        cached.cache_clear()

    assert most(make_qlora("llama", None, optimizer="adamw-8bit"))[0]["optimizer_state"] > 0


@pytest.mark.parametrize("elements", [300, 70_000])
def test_what_the_8_bit_optimizer_allocates_is_what_the_allocator_reports(elements) -> None:
    parameter = nn.Parameter(torch.randn(elements))
    parameter.grad = torch.randn(elements)
    optimizer = bitsandbytes.optim.AdamW8bit([parameter])
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer.step()
    live, peak = 0, 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    kind = "8bit_blockwise" if elements >= 4096 else "32bit"
    packet = getattr(torch.ops.bitsandbytes, f"optimizer_update_{kind}")
    (predicted,) = optimizer_workspaces()[packet]("adam", parameter.grad)

    assert 0 <= peak - predicted < 64  # numbers that are wrapped into tensors


def test_on_a_gpu_a_product_reads_and_writes_the_copy_that_it_multiplies_with() -> None:
    M, K, N = 24, 128, 64

    def run() -> None:
        packed, state = bitsandbytes.functional.quantize_4bit(torch.ones(N, K), quant_type="nf4")
        bitsandbytes.matmul_4bit(torch.ones(2, M // 2, K), packed, state)

    by_op = {op.name: op for op in trace_call("a100", run).events if isinstance(op, Op)}
    copy, product = by_op["bitsandbytes.dequantize_4bit"], by_op["mm"]

    assert copy.cost.family == "elementwise"
    assert sum(size for _, size in copy.reads) == N * K // 2 + 4 * N * K // 64
    assert sum(size for _, size in copy.writes) == 4 * N * K
    assert product.cost.flops == 2 * M * N * K


def test_on_a_gpu_every_operator_of_int8_has_a_cost_and_a_time() -> None:
    fields = {"target": "a100", "device": "cuda", "dtype": "bfloat16", "seq_len": 24}
    found = estimate(make_qlora("llama", "int8", **fields), lambda _: None)

    assert "no formula" not in (found.compute.reason or "")
    assert "time" not in found.reasons
