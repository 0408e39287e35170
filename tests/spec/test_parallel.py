"""Several ranks: how they are written, and what is refused."""

import pytest
from factory import make_experiment
from pydantic import ValidationError

from dpprof.spec.experiment import Experiment
from dpprof.spec.parallel import Parallel, read_world_size
from dpprof.spec.validation import explain


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
    assert "parallel" not in alone.canonical  # older experiments keep their names


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fsdp", "parallel: 'fsdp' is not allowed; it must be a mapping, or pairs such as "),
        ("kind=fsdp", "parallel: missing world_size"),
        ("kind=fsdp,world_size=1", "it must be greater than or equal to 2"),
        ("kind=zero,world_size=2", "parallel.kind: 'zero' is not allowed; it must be 'ddp' or "),
        ({"kind": "ddp", "world_size": True}, "it must be a number, not true or false"),
        ("kind=ddp,world_size=2,ranks=2", "unknown key 'ranks' in parallel; allowed: kind, "),
        (
            "kind=ddp,world_size=2,reshard_after_forward=true",
            "reshard_after_forward belongs to kind fsdp, and kind is ddp",
        ),
    ],
)
def test_bad_ranks_are_one_sentence(given, message) -> None:
    with pytest.raises(ValidationError) as caught:
        make_experiment(parallel=given)
    told = str(explain(caught.value, Experiment))
    assert message in told, told
    assert "\n" not in told
