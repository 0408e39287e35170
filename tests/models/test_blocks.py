"""Blocks are compared before one is taken for another."""

import pytest
from factory import make_experiment
from small_models import STAGES

from dpprof.experiments.config.architecture import Architecture
from dpprof.predict.estimate import estimate
from dpprof.subjects.models.blocks import Blocks, NotAlikeError, find_blocks, with_blocks

MODEL = {"vocab_size": 50, "d_model": 16, "layers": 6, "heads": 2}


def six(name: str, **config):
    return make_experiment(model={"hf": f"hf:{name}", "num_hidden_layers": 6, **config})


@pytest.mark.parametrize(
    ("experiment", "container"),
    [
        (make_experiment(model=MODEL), "blocks"),
        (make_experiment(model={"hf": "hf:tiny-gpt2", "n_layer": 6}), "model.transformer.h"),
        (six("tiny-llama"), "model.model.layers"),
        (six("tiny-opt"), "model.model.decoder.layers"),
        (six("tiny-gpt-neox"), "model.gpt_neox.layers"),
    ],
    ids=["own", "gpt2", "llama", "opt", "gpt-neox"],
)
def test_equal_blocks_are_found(experiment, container) -> None:
    found, fewer = find_blocks(experiment), find_blocks(with_blocks(experiment, 2))
    assert (found.container, found.count) == (container, 6)
    assert (fewer.container, fewer.count) == (container, 2)
    assert found.trained_bytes > 2 * fewer.trained_bytes > 0


@pytest.mark.parametrize(
    ("experiment", "why"),
    [
        (six("tiny-gemma2"), "layer_types differs from block to block"),
        (
            make_experiment(model=MODEL, trainable=r"blocks\.5\.|head"),
            "block 5 is not like block 0",
        ),
        (make_experiment(model=STAGES, seq_len=None), "its config counts stages, and no blocks"),
    ],
    ids=["alternating windows", "one block trained", "stages"],
)
def test_different_blocks_are_told_and_traced_as_a_whole(experiment, why) -> None:
    with pytest.raises(NotAlikeError, match=why):
        find_blocks(experiment)
    found = estimate(experiment, lambda _: None)
    assert found.memory.assumed["blocks"] == f"all were traced: {why}"


def test_a_list_with_an_entry_for_each_block_is_cut() -> None:
    experiment = six("tiny-llama", layer_types=["full_attention"] * 6)
    fewer = with_blocks(experiment, 2).model
    assert isinstance(fewer, Architecture)
    assert fewer.config["layer_types"] == ["full_attention"] * 2


def test_the_number_of_a_block_is_found_in_the_name_of_a_module() -> None:
    blocks = Blocks("model.layers", 12)
    assert blocks.split("model.layers.10.mlp") == ("model.layers.{}.mlp", 10)
    assert blocks.split("model.layers.3") == ("model.layers.{}", 3)
    for name in (None, "model.layers", "model.norm", "model.layers_2.1", "model.layers.last"):
        assert blocks.split(name) == (name, None)


def test_a_model_of_another_package_is_not_built_to_be_compared(monkeypatch) -> None:
    def build(_experiment):
        raise AssertionError("it may read elements, and there are none yet")

    monkeypatch.setattr("dpprof.subjects.models.build.registry.load", lambda *_: build)
    with pytest.raises(NotAlikeError, match="a function builds the model"):
        find_blocks(make_experiment(model="foreign"))
