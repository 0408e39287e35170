"""What a rank sends in a step, by the operators that ran, is what the closed formula says."""

import functools

import pytest
from factory import make_experiment

from dpprof.flops.collectives import bytes_each_way
from dpprof.instruments.memory import estimate
from dpprof.records.step_costs import Exchange

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = {"vocab_size": 128, "d_model": 64, "layers": 2, "heads": 2}
"""All sizes are multiples of 64, so shards of up to 64 ranks need no padding."""

PARAMETERS = 4 * (128 * 64 * 2 + 64 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64)
"""Bytes: embedding and head, positions, blocks, and the last norm."""


@functools.cache
def exchange(method: str, parallel: str, **others) -> list[Exchange]:
    fields = {"model": MODEL, "method": method, "seq_len": 64, "parallel": parallel}
    found = estimate(make_experiment(**fields | others), lambda _: None)
    assert found.model.parameters_bytes == PARAMETERS
    assert found.communication is not None
    return found.communication


def sum_of(found: list[Exchange], collective: str) -> int:
    return sum(one.bytes_each_way for one in found if one.collective == collective)


@pytest.mark.parametrize("size", [2, 64])
def test_plain_fsdp_gathers_twice_and_scatters_once(size) -> None:
    found = exchange("standard", f"kind=fsdp,world_size={size},reshard_after_forward=true")

    once = PARAMETERS * (size - 1) // size
    assert sum_of(found, "all-gather") == 2 * once
    assert sum_of(found, "reduce-scatter") == once
    assert sum_of(found, "all-reduce") == 0
    assert [(one.collective, one.phase, one.calls) for one in found] == [
        ("all-gather", "forward", 3),  # two blocks, and the rest
        ("all-gather", "backward", 3),
        ("reduce-scatter", "backward", 3),
    ]


def test_without_resharding_it_gathers_once() -> None:
    found = exchange("standard", "kind=fsdp,world_size=2,reshard_after_forward=false")

    assert sum_of(found, "all-gather") == PARAMETERS // 2
    assert sum_of(found, "reduce-scatter") == PARAMETERS // 2


def test_flash_bk_sends_what_plain_fsdp_sends_and_the_settings_that_ranks_compare() -> None:
    ranks = "kind=fsdp,world_size=4,reshard_after_forward=true"
    plain, private = exchange("standard", ranks), exchange("flash-bk", ranks)

    # Of 8 bytes each: bound, part, layers, no seed; then bound, noise, size, reduction,
    # secure mode, steps, parameters, seed.
    compared = (4 + 8) * 8 * 3
    assert sum_of(private, "all-gather") - sum_of(plain, "all-gather") == compared
    assert sum_of(private, "reduce-scatter") == sum_of(plain, "reduce-scatter")


def test_flash_gathers_the_parameters_once_more() -> None:
    ranks = "kind=fsdp,world_size=4,reshard_after_forward=true"
    one_pass, two_passes = exchange("flash-bk", ranks), exchange("flash", ranks)

    more = sum_of(two_passes, "all-gather") - sum_of(one_pass, "all-gather")
    assert more == PARAMETERS * 3 // 4
    assert sum_of(two_passes, "reduce-scatter") == sum_of(one_pass, "reduce-scatter")


def test_in_bfloat16_half_as_much_is_gathered_and_as_much_reduced() -> None:
    found = exchange(
        "standard", "kind=fsdp,world_size=2,reshard_after_forward=true", dtype="bfloat16"
    )

    assert sum_of(found, "all-gather") == PARAMETERS // 2
    assert sum_of(found, "reduce-scatter") == PARAMETERS // 2


@pytest.mark.parametrize(("method", "compared"), [("standard", 0), ("flash-bk", 8 * 8 * 3)])
def test_replicas_reduce_every_gradient_once(method, compared) -> None:
    found = exchange(method, "kind=ddp,world_size=4")

    assert sum_of(found, "all-reduce") == 2 * PARAMETERS * 3 // 4
    assert sum_of(found, "all-gather") == compared


def test_one_process_exchanges_nothing() -> None:
    found = estimate(make_experiment(model=MODEL, seq_len=64), lambda _: None)

    assert (found.communication, found.ranks) == (None, None)


@pytest.mark.parametrize(
    ("collective", "expected"),
    [("all-gather", 75), ("reduce-scatter", 75), ("all-reduce", 150), ("broadcast", 100)],
)
def test_a_ring_sends_the_least(collective, expected) -> None:
    assert bytes_each_way(collective, 100, 4) == expected
