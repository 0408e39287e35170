"""Every type of adapter of peft on a tiny Llama: exact, or refused by name."""

import functools
import importlib

import peft
import pytest
import torch
import transformers
from small_models import FLAT, TINY, assert_exact
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

from dpprof.measure.verification.float32_islands import lift_float32
from dpprof.private import UnsupportedError

V, B, T = 24, 3, 5
CONFIGS = importlib.import_module("peft.mapping").PEFT_TYPE_TO_CONFIG_MAPPING
TYPES = sorted(kind.value for kind in CONFIGS)

ONE, TWO = {"target_modules": ["q_proj"]}, {"r": 2, "target_modules": ["q_proj", "down_proj"]}
OPTIONS = {
    "ADALORA": {**ONE, "total_step": 10, "init_r": 2, "target_r": 1},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1},
    "BEFT": {},
    "BOFT": {**ONE, "boft_block_size": 2},
    "C3A": {**ONE, "block_size": 2},
    "CARTRIDGE": {"num_virtual_tokens": 3},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "FOURIERFT": {**ONE, "n_frequency": 5},
    "FROD": ONE,
    "GLORA": {**ONE, "r": 2},
    "GRALORA": {**ONE, "r": 4, "gralora_k": 2, "hybrid_r": 0},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 3, "num_tasks": 2},
    "OFT": {**ONE, "oft_block_size": 2, "r": 0},
    "OSF": {**ONE, "effective_rank": 2},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 4},
    "POLY": {**ONE, "r": 2, "n_tasks": 2, "n_skills": 2, "n_splits": 1},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "PSOFT": {**ONE, "r": 2},
    "RANDLORA": {**ONE, "r": 2},
    "ROAD": {**ONE, "group_size": 2},
    "SHADOW": {},
    "SHIRA": {**TWO, "r": 1},
    "SUPERTUNING": {**ONE, "sparsity": 0.5},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
    "VBLORA": {**ONE, "r": 2, "num_vectors": 4, "vector_length": 2, "topk": 2},
    "WAVEFT": {**ONE, "n_frequency": 5},
    "XLORA": {},
}
"""Of each type that does not take a rank alone."""

DRAWS = {"POLY", "PVERA", "SHADOW"}
"""They draw random numbers in training."""

WITH_TASKS = {"POLY", "MULTITASK_PROMPT_TUNING"}
REFUSED = {
    "CPT": "has a hook on its gradient",
    "LILY": "gave another output",
    "OSF": "has a hook on its gradient",
    "P_TUNING": "saw 1 samples, and there are 3 losses",
}
"""Lily mixes samples; P-tuning encodes its prompt once for all of them."""


SIZES = TINY | {"vocab_size": V, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"attn_implementation": "eager", "use_cache": False}


def build(config: peft.PeftConfig, kind: str = "llama", **more):
    torch.manual_seed(0)
    of_base = transformers.AutoConfig.for_model(kind, **SIZES, **more)
    base = transformers.AutoModelForCausalLM.from_config(of_base)
    model = peft.get_peft_model(base, config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def losses_of(model, ids, *tasks):
    named = {"task_ids": tasks[0]} if tasks else {}
    logits = model(input_ids=ids, **named).logits[:, -T:]
    each = cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    return each.view(ids.shape).mean(1)


def compare(model, way, *tasks, **options) -> None:
    ids = torch.randint(2, V, (B, T))
    with lift_float32():
        losses = functools.partial(losses_of, model)
        assert_exact(way, model, (ids, *tasks), losses, bound=0.05, tolerance=1e-8, **options)
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_that_trains_is_exact_or_refused(kind, way) -> None:
    config = CONFIGS[peft.PeftType(kind)]
    tasks = [torch.zeros(B, dtype=torch.long)] if kind in WITH_TASKS else []
    try:
        model = build(config(task_type="CAUSAL_LM", **OPTIONS.get(kind, TWO)))
        model.train(kind not in DRAWS)
        losses_of(model, torch.ones(B, T, dtype=torch.long), *tasks)
    except Exception as error:  # noqa: BLE001 (any part of peft may fail)
        pytest.skip(f"{kind} does not run on a tiny Llama: {error!r}"[:200])
    if kind not in REFUSED:
        compare(model, way, *tasks)
        return
    with pytest.raises((UnsupportedError, RuntimeError, ValueError), match=REFUSED[kind]):
        compare(model, way, *tasks)


SOME = {
    "DoRA": peft.LoraConfig(task_type="CAUSAL_LM", use_dora=True, init_lora_weights=False, **TWO),
    "LoRA of an embedding": peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["embed_tokens"], init_lora_weights=False
    ),
    "LoHa": peft.LoHaConfig(task_type="CAUSAL_LM", **TWO),
    "HRA": peft.HRAConfig(task_type="CAUSAL_LM", **TWO),
    "IA3, which scales": peft.IA3Config(task_type="CAUSAL_LM", **OPTIONS["IA3"]),
    "VeRA": peft.VeraConfig(task_type="CAUSAL_LM", r=2),
    "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", SOME)
def test_adapters_that_compute_with_their_parameters_are_exact(kind, way) -> None:
    compare(build(SOME[kind]), way)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    "target",
    [{"target_modules": "all-linear"}, {"target_parameters": ["experts.down_proj"], "r": 2}],
    ids=str,
)
def test_adapters_of_experts_are_exact_and_leave_the_weights_as_they_are(target, way) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **target)
    more = {"num_local_experts": 3, "num_key_value_heads": 2, "experts_implementation": "eager"}
    model = build(config, "mixtral", **more)
    frozen = {name: one.clone() for name, one in model.named_parameters() if "lora" not in name}

    compare(model, way)

    assert any("experts" in name for name, one in model.named_parameters() if one.requires_grad)
    assert not any(map(parametrize.is_parametrized, model.modules()))
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], one) for name, one in frozen.items())


def test_p_tuning_is_exact_where_the_whole_model_runs_as_one_layer(way) -> None:
    config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", **OPTIONS["P_TUNING"])
    compare(build(config), way, as_one=[""])


def test_dropout_in_such_adapters_is_refused() -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", use_dora=True, lora_dropout=0.1, **TWO)
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        compare(build(config), FLAT[0])
