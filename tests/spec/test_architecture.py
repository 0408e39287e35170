"""Hugging Face models by name: what resolves to which config, and what is refused."""

import json

import pytest
from factory import make_experiment
from pydantic import ValidationError
from snapshots import assert_sentences

from dpprof.experiments.config.architecture import Architecture, resolve
from dpprof.experiments.config.config_files import parse_config_text
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.sweep import expand, parse_config
from dpprof.experiments.config.validation import explain

TINY = {"model_type": "llama", "hidden_size": 8, "vocab_size": 11}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal_of(model):
    """Return the sentence that refuses a model."""
    with pytest.raises(ValidationError) as refusal:
        make_experiment(model=model)
    return str(explain(refusal.value, Experiment))


def write_config(path, **config):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))


def test_a_name_stands_for_its_whole_config() -> None:
    model = make_experiment(model="hf:llama-3.1-8b").model

    assert isinstance(model, Architecture)
    assert model.hf == "llama-3.1-8b"
    assert model.config["num_key_value_heads"] == 8
    assert model.config["rope_scaling"]["factor"] == 8.0


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        ("hf:qwen2.5-0.5b", "hf-qwen2-5-0-5b-"),
        ({"hf": "llama-3.2-1b", "tie_word_embeddings": False}, "hf-llama-3-2-1b-untied-"),
        ({"hf": "llama-3.1-8b", "tie_word_embeddings": False}, "hf-llama-3-1-8b-flash"),
        ({"hf": "llama-3.1-8b", "num_hidden_layers": 2}, "hf-llama-3-1-8b-custom-"),
    ],
)
def test_ids_stay_readable_and_tell_what_was_changed(model, stem) -> None:
    assert make_experiment(model=model, method="flash-bk").id.startswith(stem)


def test_the_same_name_with_another_config_is_another_experiment(folder) -> None:
    path = folder / "mine" / "config.json"
    write_config(path, **TINY)
    first = make_experiment(model=f"hf:{path.parent}")
    write_config(path, **TINY | {"hidden_size": 16})
    second = make_experiment(model="hf:./mine/config.json")

    assert first.model_name == second.model_name == "hf-mine"
    assert first.id != second.id


def test_how_a_checkpoint_was_saved_is_no_part_of_the_model(folder) -> None:
    saved = {"torch_dtype": "bfloat16", "transformers_version": "4.1", "_name_or_path": "x"}
    kernels = {"_attn_implementation": "owner/kernel", "attn_implementation": "owner/kernel"}
    write_config(folder / "a.json", **TINY, **saved, **kernels)

    assert resolve("hf:a.json") == {"hf": "a", **TINY}


def test_a_name_of_the_hub_is_that_of_the_same_bundled_model() -> None:
    assert resolve("hf:bert-base-uncased") == resolve("hf:bert-base")
    named = {"hf": "bert-large-uncased", "task": "masked-lm"}
    assert resolve(named) == resolve({"hf": "bert-large", "task": "masked-lm"})


def test_models_multiply_and_are_excluded_like_names() -> None:
    text = """
    sweeps: {s: {model: [hf:tiny-gpt2, {hf: tiny-llama, vocab_size: 50}, tiny], method: flash,
                 batch_size: 1, seq_len: 8}}
    exclude: [{model: hf:tiny-gpt2}]
    """
    runs = expand(parse_config(parse_config_text(text)), lambda: "cpu")["s"]

    assert [run.experiment.model_name for run in runs] == ["hf-tiny-llama-custom", "tiny"]


def test_what_is_no_model_is_refused_in_one_sentence(folder) -> None:
    """A name, or a config in a file, beside code that nobody runs."""
    (folder / "evil.py").write_text("raise SystemExit('it ran')")

    def refuse(model) -> str:
        if isinstance(model, str) or "hf" in model:
            return refusal_of(model)
        (folder / "config.json").write_text(json.dumps(model))
        return refusal_of("hf:config.json")

    assert_sentences("spec/architecture", refuse)


def test_without_a_network_a_sentence_says_what_to_give(monkeypatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")

    def fail(*_):
        raise errors.LocalEntryNotFoundError("no")

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    assert "cannot be reached; give the path of its config.json" in refusal_of("hf:owner/unknown")


def test_a_name_on_the_hub_fetches_its_config_alone(folder, monkeypatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    write_config(folder / "fetched.json", **TINY)
    asked = []
    monkeypatch.setattr(
        hub, "hf_hub_download", lambda *names: asked.append(names) or str(folder / "fetched.json")
    )

    assert make_experiment(model="hf:owner/Some-Model").model_name == "hf-some-model"
    assert asked == [("owner/Some-Model", "config.json")]


def test_a_config_is_named_by_its_architecture_where_nothing_else_names_it() -> None:
    assert resolve(TINY) == {"hf": "llama", **TINY}
    assert resolve(TINY | {"hf": "own"}) == {"hf": "own", **TINY}
