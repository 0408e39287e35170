"""Adapters, what is trained, padding and ranks: how they are written."""

import pytest
from factory import make_experiment

from dpprof.experiments.config.fine_tuning import Lora, Padding
from dpprof.experiments.config.parallel import Parallel, read_world_size

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


def test_ranks_are_written_as_pairs_or_as_a_mapping() -> None:
    pairs = make_experiment(parallel="kind=fsdp,world_size=8,reshard_after_forward=true")
    given = {"kind": "fsdp", "world_size": 8, "reshard_after_forward": True}

    assert pairs == make_experiment(parallel=given)
    assert pairs.parallel == Parallel(**given)


def test_ranks_are_in_the_name_and_count_for_tokens() -> None:
    alone, ranks = make_experiment(), make_experiment(parallel="kind=ddp,world_size=4")

    assert (alone.world_size, ranks.world_size) == (1, 4)
    assert ranks.id.startswith("custom-standard-b2-t4-ddp4-")
    assert (alone.tokens_in_step, ranks.tokens_in_step) == (8, 32)


@pytest.mark.parametrize("reshards", [None, True, False])
def test_the_text_of_a_cell_tells_ranks_apart_and_their_number(reshards) -> None:
    texts = {
        Parallel(kind="fsdp", world_size=size, reshard_after_forward=one).text
        for size in (2, 64)
        for one in (None, True, False)
    }
    assert len(texts) == 6
    text = Parallel(kind="fsdp", world_size=64, reshard_after_forward=reshards).text
    assert read_world_size(text) == 64
    assert read_world_size(None) == read_world_size(float("nan")) == 1
