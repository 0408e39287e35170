"""What models are trained for, and what an experiment says of its samples."""

import pytest
from factory import make_experiment
from pydantic import ValidationError
from snapshots import assert_sentences

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.tasks import name_size, name_units
from dpprof.experiments.config.validation import explain

BERT = {"hf": "bert-base", "task": "sequence-classification"}


def make(model, **fields) -> Experiment:
    return make_experiment(model=model, seq_len=None, **fields)


def test_a_task_is_inferred_where_an_architecture_has_one() -> None:
    tasks = {
        name: make_experiment(model=f"hf:{name}").task
        for name in ("tiny-llama", "t5-small", "tiny-bart")
    }
    assert tasks == {"tiny-llama": "causal-lm", "t5-small": "seq2seq-lm", "tiny-bart": "seq2seq-lm"}
    assert make("hf:vit-base").task == make("vit-b16").task == "image-classification"
    assert make_experiment(model=BERT).task == "sequence-classification"


def test_images_have_a_size_and_count_as_one_token() -> None:
    usual = make("resnet50-gn", batch_size=8)
    assert (usual.image_size, usual.seq_len, usual.tokens_in_step) == (224, 1, 8)
    assert make("hf:vit-base", image_size=384).image_size == 384
    assert make({"hf": "vit-base", "image_size": 64}).image_size == 64
    for kind in ("vit", "resnet"):
        assert make({"hf": "x", "model_type": kind}).image_size == 224
    assert make("of-another-package", image_size=7).task == "image-classification"
    assert "-i32-" in make("wrn-16-4").id
    assert Experiment.model_validate_json(usual.canonical) == usual


def test_a_task_of_none_does_not_change_an_id() -> None:
    text = make_experiment(model="hf:tiny-llama")
    named = make_experiment(model={"hf": "tiny-llama", "task": None})
    assert named.id == text.id


def test_a_task_is_part_of_names() -> None:
    experiment = make_experiment(model=BERT)
    assert experiment.model_name == "hf-bert-base-sequence-classification"
    assert experiment.model.config["vocab_size"] == 30522
    assert "task" not in experiment.model.config


def refusal_of(fields) -> str:
    with pytest.raises(ValidationError) as refusal:
        Experiment.model_validate({"method": "flash", "batch_size": 2, "device": "cpu"} | fields)
    return str(explain(refusal.value, Experiment))


def test_bad_input_is_one_sentence() -> None:
    assert_sentences("spec/tasks", refusal_of)


def test_sizes_and_units_have_names() -> None:
    assert name_size(1024, None) == "1,024 tokens"
    assert name_size(1, 224) == "224 x 224 pixels"
    assert (name_units(None), name_units(224)) == ("tokens", "samples")
