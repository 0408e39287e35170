"""Two sizes of one model share a verdict; what differs in layers does not."""

import pytest
import yaml

from dpprof.ask.questions import make_experiment
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning.artifacts import VERDICT
from dpprof.experiments.planning.code_digest import verdict_digest, verified_as
from dpprof.experiments.planning.planner import files_beyond, make_plan, write_plan
from dpprof.experiments.planning.stand_ins import (
    WINDOW,
    StandIn,
    libraries_of,
    read_stand_in,
    shrink,
)
from dpprof.experiments.records.verdict import is_stand_in


def experiment(model: str, **fields: str):
    sizes = {"method": "flash", "batch_size": "2", "seq_len": "8", "device": "cpu"}
    return make_experiment({"model": model, **sizes, **fields})


def label(model: str, **fields: str) -> str:
    return verified_as(experiment(model, **fields))


def test_sizes_of_one_architecture_share_a_verdict() -> None:
    assert label("hf:gpt2") == label("hf:gpt2-xl")
    assert label("hf:gpt2", lora="rank=8") == label("hf:gpt2", lora="rank=64,dropout=0.1")
    assert label("hf:gpt2", padding="0.1") == label("hf:gpt2", padding="0.7")


def test_a_quantised_base_shares_the_verdict_of_the_float_one() -> None:
    """Verdicts are about float64, which no format of 8 bits or less holds."""
    usual = label("hf:gpt2", lora="rank=8")
    stated = "{hf: gpt2, quantization_config: {load_in_4bit: true}}"

    assert label("hf:gpt2", lora="rank=8", quantization="nf4") == usual
    assert label(stated, lora="rank=8") == usual


@pytest.mark.parametrize(
    ("model", "fields", "start"),
    [
        ("hf:llama-3.2-1b", {}, "hf-llama-tied-"),
        ("hf:llama-3.1-8b", {"lora": "rank=16"}, "hf-llama-untied-lora-"),
        ("hf:llama-3.1-8b", {"padding": "0.2"}, "hf-llama-untied-padded-"),
        ("hf:llama-3.1-8b", {"trainable": "bias"}, "hf-llama-untied-part-"),
        ("hf:pythia-1b", {"lora": "rank=2", "padding": "0.2"}, "hf-gpt-neox-untied-lora-padded-"),
    ],
)
def test_a_label_names_its_content(model, fields, start) -> None:
    found = label(model, **fields)

    assert found.startswith(start)
    assert len(found) == len(start) + 8
    assert is_stand_in(found)
    needs_peft = "lora" in fields
    assert libraries_of(found) == (("transformers", "peft") if needs_peft else ("transformers",))


def test_what_differs_in_layers_has_verdicts_of_its_own() -> None:
    labels = {
        label("hf:llama-3.2-1b"),
        label("hf:llama-3.2-1b", lora="rank=8"),
        label("hf:llama-3.2-1b", lora="rank=8,target_modules=all-linear"),
        label("hf:llama-3.2-1b", padding="0.2"),
        label("{hf: llama-3.2-1b, tie_word_embeddings: false}"),
        label("{hf: llama-3.2-1b, attention_bias: true}"),
    }

    assert len(labels) == 6


def test_shrinking_keeps_ratios_and_kinds_and_is_done_at_once() -> None:
    config = {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256_000,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "pad_token_id": 255_999,
        "layer_types": ["sliding_attention", "full_attention"] * 13,
    }
    small = shrink(config)

    assert shrink(small) == small
    assert small["num_attention_heads"] == 2 * small["num_key_value_heads"]
    assert small["hidden_size"] != small["head_dim"] * small["num_attention_heads"]
    assert small["layer_types"] == ["sliding_attention", "full_attention"]
    assert (small["num_hidden_layers"], small["sliding_window"]) == (2, WINDOW)
    assert small["attn_logit_softcapping"] == 50.0
    assert small["pad_token_id"] < small["vocab_size"] < 20


def test_layers_of_three_kinds_are_all_kept() -> None:
    kinds = ["a", "a", "b", "a", "c", "a"]
    small = shrink({"model_type": "x", "num_hidden_layers": 6, "layer_types": kinds})

    assert (small["layer_types"], small["num_hidden_layers"]) == (["a", "b", "c"], 3)


def test_a_config_with_sizes_left_to_the_library_stays_whole() -> None:
    stated = StandIn.of(experiment("{hf: other, model_type: mistral, hidden_size: 4096}"))

    assert stated.model.config == {"model_type": "mistral", "hidden_size": 4096}


def test_a_plan_writes_what_its_verdicts_are_about(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = {"model": ["hf:gpt2", "hf:gpt2-xl"], "method": ["flash", "standard"]}
    sweep |= {"batch_size": 1, "seq_len": 4, "instruments": "estimate", "target": "h100"}
    plan = make_plan(yaml.safe_load(yaml.safe_dump({"sweeps": {"s": sweep}})))
    write_plan(plan)
    ((path, stand_in),) = plan.stand_ins.items()

    assert read_stand_in(path) == stand_in
    assert [one.stem for one in plan.paths(VERDICT)] == [
        f"{path.stem}-flash",
        f"{path.stem}-standard",
    ]
    assert files_beyond(tmp_path, [plan]) == []
    stale = path.with_name("hf-gpt2-00000000.json")
    stale.write_text(path.read_text())
    assert files_beyond(tmp_path, [plan]) == [tmp_path / stale]
    with pytest.raises(InputError, match="was edited: its content belongs to hf-gpt2-"):
        read_stand_in(stale)


def test_a_verdicts_digest_has_the_versions_of_the_libraries(monkeypatch) -> None:
    whole, adapted = label("hf:gpt2"), label("hf:gpt2", lora="rank=8")
    digests = {verdict_digest(whole, "flash"), verdict_digest(adapted, "flash")}

    assert len(digests) == 2
    assert verdict_digest(whole, "flash") != verdict_digest("built-in", "flash")
