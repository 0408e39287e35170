"""What a rank sends in a step, by the operators that ran, is what the closed formula says."""

import functools
from collections import Counter

import pytest
from factory import make_experiment

from dpprof.experiments.records.step_costs import Exchange
from dpprof.predict.estimate import estimate
from dpprof.predict.memory.exchanges import bytes_each_way

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = {"vocab_size": 128, "d_model": 64, "layers": 1, "heads": 2}
"""All sizes are multiples of 64, so shards of up to 64 ranks need no padding."""

PARAMETERS = 4 * (128 * 64 * 2 + 64 * 64 + (12 * 64 * 64 + 13 * 64) + 2 * 64)
"""Bytes: embedding and head, positions, the block, and the last norm."""

SHARDED = "kind=fsdp,world_size={},reshard_after_forward=true"
HALF, OF_FOUR, OF_64 = PARAMETERS // 2, PARAMETERS * 3 // 4, PARAMETERS * 63 // 64

# Of 8 bytes each: bound, part, layers, other code, what waits; bound, stability, noise, size,
# reduction, secure mode, steps, parameters, what is reduced together.
COMPARED = (5 + 9) * 8 * 3
"""Settings that 4 ranks compare."""


@functools.cache
def exchange(
    method: str, parallel: str, dtype: str = "float32", accumulation: int = 1
) -> list[Exchange]:
    fields = {"model": MODEL, "method": method, "seq_len": 64, "parallel": parallel}
    fields |= {"dtype": dtype, "accumulation": accumulation}
    found = estimate(make_experiment(**fields), lambda _: None)
    assert found.model.parameters_bytes == PARAMETERS
    assert found.communication is not None
    return found.communication


@pytest.mark.parametrize(
    ("case", "sent"),
    [
        (("standard", SHARDED.format(2)), (2 * HALF, HALF)),
        (("standard", SHARDED.format(64)), (2 * OF_64, OF_64)),
        (("standard", SHARDED.format(2).replace("true", "false")), (HALF, HALF)),
        # Half as much is gathered, and as much reduced.
        (("standard", SHARDED.format(2), "bfloat16"), (HALF, HALF)),
        (("flash-bk", SHARDED.format(4)), (2 * OF_FOUR + COMPARED, OF_FOUR)),
        # Parameters are gathered once more, and ranks tell whether any measures samples alone.
        (("flash", SHARDED.format(4)), (3 * OF_FOUR + COMPARED, OF_FOUR, 6)),
        (("standard", "kind=ddp,world_size=4"), (0, 0, 2 * OF_FOUR)),
        (("flash-bk", "kind=ddp,world_size=4"), ((9 + 2) * 8 * 3, 0, 2 * OF_FOUR)),
        # Of five batches the last, or each.
        (("standard", "kind=ddp,world_size=4", "float32", 5), (0, 0, 2 * OF_FOUR)),
        (("standard", "kind=ddp,world_size=4,exchange=each", "float32", 5), (0, 0, 10 * OF_FOUR)),
        (("standard", SHARDED.format(4), "float32", 5), (10 * OF_FOUR, OF_FOUR)),
        (
            ("standard", SHARDED.format(4) + ",exchange=each", "float32", 5),
            (10 * OF_FOUR, 5 * OF_FOUR),
        ),
    ],
    ids=str,
)
def test_a_rank_sends_what_the_formula_says(case, sent) -> None:
    sums = Counter()
    for one in exchange(*case):
        sums[one.collective] += one.bytes_each_way

    names = ("all-gather", "reduce-scatter", "all-reduce")
    assert {name: size for name, size in sums.items() if size} == {
        name: size for name, size in zip(names, sent, strict=False) if size
    }


def test_exchanges_have_their_phase_and_calls() -> None:
    found = exchange("standard", SHARDED.format(2))

    assert [(one.collective, one.phase, one.calls) for one in found] == [
        ("all-gather", "forward", 2),  # a block, and the rest
        ("all-gather", "backward", 2),
        ("reduce-scatter", "backward", 2),
    ]


def test_one_process_exchanges_nothing() -> None:
    found = estimate(make_experiment(model=MODEL, seq_len=64), lambda _: None)

    assert (found.communication, found.ranks) == (None, None)


@pytest.mark.parametrize(
    ("collective", "expected"),
    [("all-gather", 75), ("reduce-scatter", 75), ("all-reduce", 150), ("broadcast", 100)],
)
def test_a_ring_sends_the_least(collective, expected) -> None:
    assert bytes_each_way(collective, 100, 4) == expected
