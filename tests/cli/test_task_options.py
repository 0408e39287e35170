"""The option ``--task``, and the options for images."""

import argparse

import pytest
from snapshots import assert_sentences

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


def refusal_of(options: list[str]) -> str:
    with spelling_options(), pytest.raises(InputError) as refusal:
        read(*options)
    return str(refusal.value)


def test_bad_options_are_one_sentence() -> None:
    assert_sentences("cli/task options", refusal_of)
