"""Mixtures of experts and recurrent models: recorded memory equals the estimate to the byte."""

import itertools

import pytest
import transformers
from factory import make_experiment
from memory_steps import record_and_estimate

from dpprof.experiments.config import registry

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
CONFIGS = {
    "mixtral": {**SMALL, **HEADS, "num_local_experts": 4},
    "qwen2_moe": {
        **SMALL,
        **HEADS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "mamba": {**SMALL, "state_size": 4},
    "rwkv": {**SMALL, "context_length": 64},
    "xlstm": {**SMALL, "hidden_size": 32, "embedding_dim": 32, "num_heads": 2},
}
OPACUS = [name for name in registry.names("methods") if name.startswith("opacus")]
REFUSED = {
    # Opacus calls experts without the tokens' choices; code of RWKV reads shapes of its weights.
    **{kind: {*OPACUS} for kind in ("mixtral", "qwen2_moe")},
    "rwkv": {*OPACUS, "per-layer"},
    # A tied table; expanded weights know few operators.
    "mamba": {"opacus-adaptive", "opacus-ew", "opacus-ghost", "per-layer"},
    "xlstm": {"opacus-ew"},
}
QUICK = ("mixtral", "flash-bk")
CASES = [
    case if case == QUICK else pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(CONFIGS, registry.names("methods"))
    if case[1] not in REFUSED[case[0]]
]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_an_estimate_equals_what_is_recorded(kind, method, tmp_path) -> None:
    transformers.AutoConfig.for_model(kind, **CONFIGS[kind]).save_pretrained(tmp_path)

    record_and_estimate(
        make_experiment(
            model=f"hf:{tmp_path}", method=method, batch_size=3, seq_len=24, noise_multiplier=0.1
        )
    )
