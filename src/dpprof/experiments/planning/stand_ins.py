"""The small models that stand for Hugging Face models in verification.

A stand-in has the layers of the real model and none of its sizes: the same architecture, flags,
adapters' targets and ratio of heads to key-value heads. So one verdict covers every size. Flags
stay: biases, activations, soft-capping, tied weights, kinds of rotary embeddings. Sizes are those
keys of a config that are named here. Nothing here imports transformers.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.fine_tuning import Lora, Padding, Trainable
from dpprof.experiments.config.spec import Spec
from dpprof.experiments.config.validation import InputError, read_model
from dpprof.experiments.records.verdict import STAND_IN_PREFIX

_RANK = 2
_PADDING = Padding(fraction=0.4)
_LONGEST_KIND = 40

WINDOW = 4  # the width of a sliding window, if there is one, is shorter than the sequences

_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers"),
)
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_WINDOWS = (
    *("sliding_window", "attention_window_size", "window_size"),
    *("attention_chunk_size", "chunk_size", "mamba_chunk_size"),
)
_LEAST_LAYERS, _MOST_HEADS_PER_KEY, _HEAD, _WIDE_HEAD, _VOCABULARY = 2, 8, 8, 12, 13

_SIZES: Mapping[str, int] = {
    name: size
    for size, names in {
        _VOCABULARY: "vocab_size vocab_size_per_layer_input",
        _HEAD: (
            "head_dim global_head_dim v_head_dim qk_nope_head_dim query_pre_attn_scalar "
            "index_head_dim linear_key_head_dim linear_value_head_dim "
            "q_lora_rank kv_lora_rank d_kv"
        ),
        4: (
            "qk_rope_head_dim rotary_dim num_local_experts num_experts n_routed_experts "
            "moe_num_experts state_size ssm_state_size mamba_d_state index_topk"
        ),
        2: (
            "sliding_window_pattern full_attention_interval num_experts_per_tok "
            "num_experts_per_token moe_topk moe_k time_step_rank mamba_dt_rank index_n_heads "
            "linear_num_key_heads linear_num_value_heads"
        ),
        1: (
            "max_window_layers n_shared_experts num_shared_experts moe_num_shared_experts "
            "n_group topk_group first_k_dense_replace mamba_expand expand n_groups "
            "mamba_n_groups"
        ),
        24: (
            "intermediate_size ffn_dim ffn_hidden_size d_ff dff n_inner intermediate_size_mlp "
            "encoder_ffn_dim decoder_ffn_dim"
        ),
        5: "num_labels",
        32: "image_size",
        12: (
            "moe_intermediate_size shared_expert_intermediate_size "
            "moe_shared_expert_intermediate_size shared_intermediate_size qk_head_dim"
        ),
        64: "max_position_embeddings n_positions max_seq_len n_ctx",
    }.items()
    for name in names.split()
} | dict.fromkeys(_WINDOWS, WINDOW)
"""Sizes that become these numbers; null and zero stay."""

_ALIKE = {
    **dict.fromkeys(("gpt2", "gpt_neox", "gptj", "opt", "bloom"), False),
    **dict.fromkeys(("bert", "roberta", "t5", "vit"), False),
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "gemma2", "phi", "phi3"), True),
}
"""Architectures whose layers differ in pairs at most, and whether they state key-value heads."""


class StandIn(Spec):
    """What of a Hugging Face experiment a verdict is about, besides the method.

    Where the spec's config states every size, these are reduced here. Otherwise the config is
    whole, and is reduced where transformers can complete it.
    """

    model: Architecture
    lora: Lora | None = None
    trainable: Trainable | None = None
    padding: Padding | None = None

    @classmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return the stand-in of an experiment's model; None if it is no Hugging Face model."""
        if not isinstance(experiment.model, Architecture):
            return None
        config, lora = experiment.model.config, experiment.lora
        config.pop("quantization_config", None)  # a verdict is about float64
        kind = experiment.model.model_type
        usual = "all" if lora is None else "lora"
        small = shrink(config) if can_shrink(config) else config
        return cls(
            model=Architecture(hf=kind, task=experiment.model.task, **small),
            lora=lora
            if lora is None or lora.ia3
            else Lora(rank=_RANK, target_modules=lora.target_modules),
            trainable=None if experiment.trained == usual else experiment.trained,
            padding=experiment.padding and _PADDING,
        )

    @property
    def label(self) -> str:
        """The name in files: ``hf-llama-tied-lora-padded-3f9a1c02``.

        It says how weights are tied only if the config states it. The digits are the digest's.
        """
        tied = self.model.config.get("tie_word_embeddings")
        parts = [
            self.model.slug.removeprefix(STAND_IN_PREFIX)[:_LONGEST_KIND],
            "" if tied is None else "tied" if tied else "untied",
            "" if self.lora is None else "lora",
            "" if self.trainable is None else "part",
            "" if self.padding is None else "padded",
            self.digest[:8],
        ]
        return STAND_IN_PREFIX + "-".join(filter(None, parts))


def libraries_of(label: str) -> tuple[str, ...]:
    """Return the distributions that build a stand-in, by its name."""
    adapted = re.search(r"-lora(-part)?(-padded)?-[0-9a-f]{8}$", label)
    return ("transformers", "peft") if adapted else ("transformers",)


def read_stand_in(path: Path) -> StandIn:
    """Read the file of a stand-in.

    Raises:
        InputError: The file is not valid, or its content does not match its name.
        OSError: It cannot be read.
    """
    stand_in = read_model(path, StandIn, "the model of a verification")
    if path.stem != stand_in.label:
        raise InputError(f"{path}: was edited: its content belongs to {stand_in.label}")
    return stand_in


def can_shrink(config: Mapping[str, Any]) -> bool:
    """Tell whether a config states every size, so that the library's defaults do not matter."""
    kind = config["model_type"]
    needed = [_LAYERS, _HEADS, _WIDTHS, *([_KEY_VALUE_HEADS] if _ALIKE.get(kind) else [])]
    return kind in _ALIKE and all(_find(config, names) is not None for names in needed)


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with small sizes; a second time changes nothing more.

    Lists with an element for each layer keep one layer of each kind, and two at least. Heads keep
    their ratio to key-value heads, up to eight. Rotary factors for frequencies are cut. Dropout is
    off.
    """
    small = dict(config)
    small |= {name: size for name, size in _SIZES.items() if config.get(name)}
    small |= _shrink_layers(config)
    small |= _shrink_heads(config)
    vocabulary = _VOCABULARY
    for name, value in config.items():
        if "drop" in name and isinstance(value, float):
            small[name] = 0.0  # some models drop out without a layer that could be switched off
        if name.endswith("_token_id") and isinstance(value, int) and value >= vocabulary:
            small[name] = vocabulary - 1
        if name.startswith("rope_") and isinstance(value, dict):
            cut = ("short_factor", "long_factor")
            small[name] = {key: x[: _HEAD // 2] if key in cut else x for key, x in value.items()}
    return small


def _find(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((int(config[name]) for name in names if config.get(name)), None)


def _shrink_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    count = _find(config, _LAYERS)
    if count is None:
        return {}
    each = {
        name: value
        for name, value in config.items()
        if isinstance(value, list | tuple) and len(value) == count
    }
    kinds = [tuple(repr(value[layer]) for value in each.values()) for layer in range(count)]
    picks = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    others = [layer for layer in range(count) if layer not in picks]
    picks += others[: max(0, _LEAST_LAYERS - len(picks))]
    small: dict[str, Any] = {
        name: [value[layer] for layer in sorted(picks)] for name, value in each.items()
    }
    if isinstance(config.get("attention_types"), list):  # pairs of kinds and how often they repeat
        kinds_once = [[kinds, 1] for kinds, _ in config["attention_types"]]
        small["attention_types"] = kinds_once
        picks = [kind for kinds, _ in kinds_once for kind in kinds]
    return small | {name: len(picks) for name in _LAYERS if config.get(name)}


def _shrink_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = _find(config, _HEADS), _find(config, _WIDTHS)
    if heads is None:
        return {} if width is None else _replace_width(config, width, 2 * _HEAD)
    shared = _find(config, _KEY_VALUE_HEADS)
    ratio = heads // (shared or heads)
    keys = min(shared or heads, 2)
    small: dict[str, Any] = {name: keys for name in _KEY_VALUE_HEADS if config.get(name)}
    count = keys * min(ratio, _MOST_HEADS_PER_KEY)
    small |= {name: count for name in _HEADS if config.get(name)}
    if width is None:
        return small
    head = config.get("head_dim")
    apart = head is not None and head * heads != width
    return small | _replace_width(config, width, count * (_WIDE_HEAD if apart else _HEAD))


def _replace_width(config: Mapping[str, Any], width: int, small: int) -> dict[str, Any]:
    """Replace the width, and sizes that are equal to it."""
    return {
        name: small
        for name, value in config.items()
        if value == width
        and isinstance(value, int)
        and name not in _SIZES
        and (name in _WIDTHS or name.endswith(("_size", "_dim", "_width")))
    }
