"""Hugging Face models: recorded memory, the estimate, and what freezing spares."""

import itertools

import pytest
from factory import make_experiment
from memory_steps import record_and_estimate

from dpprof.experiments.config.loops import LOOPS
from dpprof.predict.estimate import estimate

TIED = {"hf": "tiny-llama", "tie_word_embeddings": True}
MODELS = ["gpt2", "llama", TIED, "qwen2", "mistral", "gemma2", "gpt-neox", "opt", "phi"]
REFUSED = {
    # Weights that are used twice.
    "opacus-ghost": ("gpt2", TIED, "qwen2", "gemma2", "opt"),
    # An embedding with a buffer.
    "opacus-hooks": ("gemma2",),
    "flash-bk": (),
    "standard": (),
}
LORA, DORA = {"lora": {"rank": 2}}, {"lora": {"rank": 2, "use_dora": True}}
PADDED = {"padding": {"fraction": 0.3}}


def in_16_bits(dtype: str, **fields) -> dict:
    """Compute in the dtype of parameters, without autocast."""
    return {"dtype": dtype, "parameters_dtype": dtype, "autocast": False, **fields}


def make(model, method: str, **fields):
    name = f"hf:tiny-{model}" if isinstance(model, str) else model
    usual = {"batch_size": 3, "seq_len": 24, "noise_multiplier": 0.1}
    return make_experiment(model=name, method=method, **usual | fields)


QUICK = [
    ("gpt2", "flash-bk", {"optimizer": "lamb"} | PADDED),
    ("llama", "opacus-ghost", LORA | PADDED),
    ("llama", "flash-bk", in_16_bits("float16", loss_scale=1024, keep_logits=True, **LORA)),
    ("gemma2", "flash-bk", {"loop": "torchtune", "dtype": "bfloat16"}),
    ("llama", "standard", {"optimizer": "paged-adamw-8bit-in-backward"}),
    ("llama", "flash-bk", DORA | {"dtype": "bfloat16"}),
    ("llama", "flash-bk", {"lora": "ia3"}),
]
ACCUMULATED = {"accumulation": 4, "loop": "hf-trainer", "dtype": "bfloat16"}
SLOW = [
    (model, method, lora | padding)
    for model, method, lora, padding in itertools.product(MODELS, REFUSED, ({}, LORA), ({}, PADDED))
    if lora or model not in REFUSED[method]
]
SLOW += [
    ("gpt2", "flash-bk", {"loop": "hf-manual"} | PADDED),
    ("llama", "standard", {"loop": "hf-trainer", "dtype": "bfloat16"}),
    ("gpt2", "standard", DORA),
]
SLOW += [
    ("llama", method, ACCUMULATED | fields)
    for method in ("standard", "flash-bk")
    for fields in ({}, LORA, LORA | {"checkpointing": "non-reentrant"})
]
SLOW += [
    ("llama", "standard", {"optimizer": "adamw-in-backward", "checkpointing": "non-reentrant"})
]
ON_HEAD = {"lora": {"rank": 2, "target_modules": ["q_proj", "lm_head"]}, "loop": "torchtune"}
SLOW += [("llama", method, ON_HEAD) for method in ("standard", "flash-bk", "flash")]
SLOW += [("llama", method, {"optimizer": "lion-8bit"}) for method in ("standard", "flash-bk")]
SLOW += [("llama", "standard", {"padding": "packed"} | fields) for fields in ({}, ACCUMULATED)]
SLOW += [
    (model, method, {"lora": "ia3"} | fields)
    for model in ("llama", "gpt2")
    for method in ("standard", "flash-bk", "flash", "microbatch")
    for fields in ({}, {"dtype": "bfloat16", "parameters_dtype": "bfloat16"})
]
SLOW += [
    (model, method, DORA | fields)
    for model in ("llama", "qwen2")
    for method in ("standard", "flash-bk", "flash", "microbatch")
    for fields in ({}, {"dtype": "bfloat16", "parameters_dtype": "bfloat16"})
]
SLOW += [
    ("llama", "standard", LORA | {"dtype": "bfloat16", "parameters_dtype": "bfloat16"}),
    ("llama", "flash-bk", LORA | {"checkpointing": "non-reentrant"}),
    ("llama", "microbatch", PADDED),
    ("llama", "flash", {"dtype": "float16", "loss_scale": 1024} | PADDED),
    ("llama", "standard", {"dtype": "float16", "head": "chunked"}),
]
SLOW += [
    (model, method, in_16_bits(dtype, **fields))
    for model in ("llama", "qwen2", "gemma2")
    for method in ("standard", "flash-bk", "flash")
    for dtype in ("bfloat16", "float16")
    for whole in ({"trained_dtype": dtype, "optimizer": "sgd" if dtype == "float16" else "adamw"},)
    for fields in (LORA, whole, LORA | whole)
]
SLOW += [
    ("llama", method, {"optimizer": optimizer} | fields)
    for method in ("standard", "flash-bk", "flash", "opacus-hooks", "microbatch")
    for optimizer in ("sgd-momentum", "lamb")
    for fields in ({}, LORA | {"dtype": "bfloat16"})
]
SLOW += [
    (model, method, {"loop": loop, **fields})
    for model, method, loop in itertools.product(("gpt2", "llama"), ("standard", "flash-bk"), LOOPS)
    for fields in ({}, {"dtype": "bfloat16"}, in_16_bits("float16", **LORA))
]
SLOW += [
    ("llama", method, in_16_bits("float16", loss="sum-of-logits", loss_dtype="logits", **LORA))
    for method in ("standard", "flash-bk", "opacus-hooks", "microbatch")
]


@pytest.mark.parametrize(
    ("model", "method", "fields"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_an_estimate_equals_what_is_recorded_and_who_owns_it_is_known(
    model, method, fields
) -> None:
    real, fake = record_and_estimate(make(model, method, **fields))

    assert fake.compute.flops_by_phase == real.compute.flops_by_phase
    guessed = real.memory.attribution.evidence["phase"]
    guessed += real.memory.at_peak.components["unattributed"]
    assert guessed <= 0.1 * real.memory.peak_allocated_bytes


def test_a_frozen_weight_has_no_gradient_and_no_optimizer_state() -> None:
    for method in ("standard", "flash-bk"):
        measurement = estimate(make("llama", method, **LORA), lambda _: None)
        trained, components = measurement.model.parameters_trainable, measurement.memory.timeline
        sizes = {name: max(line) for name, line in components.components.items()}

        assert trained < 0.1 * measurement.model.parameters_total
        assert sizes["parameters"] >= measurement.model.parameters_bytes
        assert sizes["gradients"] <= 2 * 4 * trained
        # AdamW keeps two moments of each element, and a count of steps of each parameter.
        assert 8 * trained <= sizes["optimizer_state"] <= 8 * trained + 4 * 32


def test_padding_takes_the_bytes_of_its_mask_on_a_gpu() -> None:
    B, T, V = 4, 128, 211
    fields = {
        "dtype": "bfloat16",
        "target": "h100",
        "device": "cuda",
        "batch_size": B,
        "seq_len": T,
    }
    notes, attended = {}, {}
    for padding in ({}, PADDED):
        memory = estimate(make("llama", "standard", **fields | padding), lambda _: None).memory
        notes[bool(padding)] = {one for one in memory.assumed if one.startswith("attention")}
        attended[bool(padding)] = memory.peak_allocated_bytes

    assert notes == {False: {"attention: cudnn"}, True: {"attention: cudnn"}}
    # Whether a token may attend to another, in bytes, and as bfloat16 for each layer.
    assert attended[True] - attended[False] >= B * T * T * (1 + 2 * 2)
    assert attended[True] - attended[False] < B * T * (T * (1 + 2 * 2) + V)
