"""Adapters, what is trained, and padding: how they are written, and what is refused."""

import pytest
from factory import make_experiment
from pydantic import ValidationError

from dpprof.spec.experiment import Experiment
from dpprof.spec.fine_tuning import Lora, Padding
from dpprof.spec.validation import explain

MODEL = {"model": "hf:tiny-llama"}


def test_adapters_are_written_as_pairs_or_as_a_mapping() -> None:
    pairs = make_experiment(**MODEL, lora="rank=16,target_modules=q_proj+v_proj").lora
    mapping = make_experiment(**MODEL, lora={"rank": 16, "target_modules": ["q_proj", "v_proj"]})

    assert pairs == mapping.lora == Lora(rank=16, target_modules=("q_proj", "v_proj"))
    assert pairs.scale == 32


def test_what_is_trained_follows_from_the_adapters() -> None:
    assert make_experiment(**MODEL).trained == "all"
    assert make_experiment(**MODEL, lora="rank=2").trained == "lora"
    assert make_experiment(**MODEL, lora="rank=2", trainable="all").trained == "all"


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_lengths_have_the_mean_that_was_asked_for(fraction, batch_size) -> None:
    lengths = Padding(fraction=fraction).lengths(batch_size, 1_000, seed=3)

    assert len(lengths) == batch_size
    assert all(1 <= length <= 1_000 for length in lengths)
    assert sum(lengths) / batch_size == pytest.approx(1_000 * (1 - fraction), abs=1)


def test_lengths_differ_and_belong_to_the_seed() -> None:
    padding = Padding(fraction=0.25)

    assert len(set(padding.lengths(8, 1_000, seed=0))) == 8
    assert padding.lengths(8, 1_000, seed=0) == padding.lengths(8, 1_000, seed=0)
    assert padding.lengths(8, 1_000, seed=0) != padding.lengths(8, 1_000, seed=1)


def test_every_sample_keeps_a_token() -> None:
    assert Padding(fraction=0.999).lengths(5, 4, seed=0) == [1] * 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora": "rank=0"}, "lora.rank: '0' is not allowed; it must be greater than or equal"),
        ({"lora": {"alpha": 3}}, "lora: missing rank"),
        ({"lora": {"rnk": 3, "rank": 1}}, "unknown key 'rnk' in lora; did you mean 'rank'?"),
        ({"lora": "16"}, "it must be a mapping, or pairs such as rank=16,alpha=32"),
        ({"lora": "rank=2,target_modules="}, "it must be all-linear, or at least one module"),
        ({"lora": {"rank": 2, "dropout": 1}}, "lora.dropout: 1 is not allowed"),
        ({"padding": 1}, "padding.fraction: 1 is not allowed; it must be less than 1"),
        ({"padding": True}, "padding"),
        ({"trainable": "(("}, "or a regular expression, and missing )"),
        ({"trainable": ["x"]}, "trainable: ['x'] is not allowed; it must be a valid string"),
        ({"trainable": {}}, "trainable: {} is not allowed; it must be a valid string"),
        ({"trainable": "lora"}, "trainable lora requires lora, such as lora: {rank: 16}"),
        ({"parameters_dtype": "bfloat16"}, "requires dtype bfloat16, but dtype is float32"),
        ({"model": "tiny", "lora": {"rank": 2}}, "lora requires a Hugging Face model"),
        ({"model": "tiny", "padding": 0.1}, "padding requires a Hugging Face model"),
    ],
)
def test_bad_input_is_one_sentence(given, said) -> None:
    with pytest.raises(ValidationError) as refusal:
        make_experiment(**MODEL | given)

    assert said in str(explain(refusal.value, Experiment))
