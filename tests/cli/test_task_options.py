"""The option ``--task``, and the options for images."""

import argparse

import pytest

from dpprof.ask.commands.options import add_experiment_options, read_given
from dpprof.ask.questions import make_experiment
from dpprof.experiments.config.validation import InputError, spelling_options


def read(*options: str):
    parser = argparse.ArgumentParser()
    add_experiment_options(parser)
    usual = ("--method", "flash", "--batch-size", "2", "--device", "cpu")
    return make_experiment(read_given(parser.parse_args([*options, *usual])))


def test_a_task_is_a_key_of_the_model() -> None:
    by_option = read("--model", "hf:bert-base", "--task", "masked-lm", "--seq-len", "8")
    by_key = read("--model", "{hf: bert-base, task: masked-lm}", "--seq-len", "8")

    assert by_option == by_key
    assert by_option.task == "masked-lm"


def test_images_take_a_size_and_no_length() -> None:
    assert read("--model", "vit-b16").image_size == 224
    assert read("--model", "vit-b16", "--image-size", "384").image_size == 384


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "tiny"], "missing: --seq-len"),
        (
            ["--model", "vit-b16", "--seq-len", "8"],
            "--seq-len: '8' is not allowed; the model reads",
        ),
        (
            ["--model", "hf:bert-base", "--task", "poetry", "--seq-len", "8"],
            "--model.task: 'poetry' is not allowed; it must be 'causal-lm', 'masked-lm'",
        ),
        (
            ["--model", "tiny", "--task", "masked-lm", "--seq-len", "8"],
            "--task: 'masked-lm' is not allowed; it is a key of a Hugging Face model",
        ),
        (
            ["--model", "{hf: bert-base, task: masked-lm}", "--task", "masked-lm"],
            "--task: 'masked-lm' is not allowed; it is a key of a Hugging Face model",
        ),
    ],
)
def test_bad_options_are_one_sentence(options, said) -> None:
    with spelling_options(), pytest.raises(InputError) as refusal:
        read(*options)

    assert str(refusal.value).startswith(said)
    assert "\n" not in str(refusal.value)
