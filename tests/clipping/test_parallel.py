"""Clipping on several ranks is clipping of the joint batch on one, with noise once per element."""

import itertools
from collections.abc import Iterator

import numpy as np
import parallel_cases
import pytest
import torch
from documents import PRIVATE_TRAINING, find_code
from parallel_training import WAYS, Case, Trained, train_alone, train_ranks
from products import one_in
from rank_pool import RankPools
from small_models import KINDS
from strategy_matrices import matrix as matrix_of

from dpprof.private import UnsupportedError, make_strategy
from dpprof.private.noise.strategies import NOISES

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS_OF_RANKS = ["ddp", "fsdp"]
EVERY_KIND = [*KINDS_OF_RANKS, "hsdp"]
UNEVEN = {
    2: [[[[0, 1, 2]], [[3]]], [[[]], [[4, 5]]], [[[6]], [[]]], [[[]], [[]]]],
    4: [[[[0, 1]], [[2]], [[]], [[3, 4, 5]]], [[[]], [[]], [[6]], [[]]]],
}
"""By world size: batches by rank; each is one part."""

IN_PARTS = {
    2: [[[[0, 1], [2]], [[], [3]]], [[[], []], [[4, 5], []]]],
    4: [[[[0], [1], [2]], [[3], [], []], [[], [], []], [[], [4, 5], [6]]]],
}
"""The same in parts."""

QUICK = [
    (2, Case("ours", "flash-bk", "fsdp", checkpointing=True), UNEVEN),
    (2, Case("ours", "flash", "fsdp", tied=True), IN_PARTS),
    (2, Case("ours", "flash-bk", "ddp", tied=True), IN_PARTS),
    (2, Case("ours", "flash", "fsdp", tied=True, checkpointing=True, reshard=False), UNEVEN),
    (2, Case("ours", "flash", "ddp", head="chunked"), UNEVEN),
    (2, Case("beside", "flash-bk", "ddp"), UNEVEN),
    (2, Case("beside", "flash", "fsdp"), UNEVEN),
    (2, Case("ours", "flash", "fsdp", stability=0.01), IN_PARTS),
    (2, Case("ours", "flash-bk", "ddp", stability=0.01), UNEVEN),
    (2, Case("ours", "flash-bk", "hsdp", tied=True, checkpointing=True), IN_PARTS),
]
EVERY = [
    (size, Case(model, way, kind, tied, checkpointing, reshard), steps)
    for size in (2, 4)
    for model in ("ours", "gpt2", "llama", "adapters")
    for way in WAYS
    for kind in KINDS_OF_RANKS
    for tied, checkpointing in itertools.product((False, True), repeat=2)
    for reshard in ((True, False) if kind == "fsdp" else (True,))
    for steps in (UNEVEN, IN_PARTS)
]
EVERY += [
    (2, Case(model, way, kind, tied, head=head), UNEVEN)
    for model in ("ours", "gpt2", "llama", "adapters")
    for way in WAYS
    for kind in KINDS_OF_RANKS
    for tied in (False, True)
    for head in (("kept",) if kind == "fsdp" else ("chunked", "kept"))
]
EVERY += [
    (size, Case("llama", way, "hsdp", tied, checkpointing), steps)
    for size in (2, 4)
    for way in WAYS
    for tied, checkpointing in itertools.product((False, True), repeat=2)
    for steps in (UNEVEN, IN_PARTS)
]
EVERY += [
    (2, Case(model, way, kind, checkpointing=checkpointing), IN_PARTS)
    for model in ("beside", "bert")
    for way in WAYS
    for kind in EVERY_KIND
    for checkpointing in (False, True)
]


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    """Of its own: Opacus's methods leave meshes that ``torch.save`` does not take."""
    made = RankPools()
    yield made
    made.close()


def assert_same(ranks: list[Trained], alone: Trained, tolerance: float = 1e-9) -> None:
    for rank in ranks:
        assert len(rank.sums) == len(alone.sums)
        for found, expected in zip(rank.sums, alone.sums, strict=True):
            assert found.keys() == expected.keys()
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=0, atol=tolerance)
        for name, weight in alone.weights.items():
            torch.testing.assert_close(rank.weights[name], weight, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("size", "case", "steps"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in EVERY if one not in QUICK)],
)
def test_sums_and_weights_are_those_of_the_joint_batch(pools, size, case, steps) -> None:
    ranks = pools[size].compute(train_ranks, case, steps[size])
    alone = train_alone(case, steps[size])

    assert_same(ranks, alone)
    norms = torch.cat(alone.norms)
    assert (norms > 0.5).any()  # some are clipped
    assert len(norms) == len(torch.cat([one for rank in ranks for one in rank.norms]))


FEWER = UNEVEN[2][1:]
"""Without the first, which is empty on a rank."""
OTHERS = {
    "FSDP would reduce in 16 bits": ("train_in_precision", ["fsdp"], UNEVEN[2], torch.float32),
    "samples of one rank are measured alone": ("train_measuring_alone", KINDS_OF_RANKS, UNEVEN[2]),
    "parameters are sharded by another axis": ("train_sharded_by_columns", ["fsdp"], UNEVEN[2]),
    "trained before": ("train_after_ordinary_steps", KINDS_OF_RANKS, FEWER, False),
    "run before": ("train_after_ordinary_steps", KINDS_OF_RANKS, FEWER, True),
    "other numbers of parts": (
        *("train_ranks", ["ddp"], [[[[0], [1, 2], []], [[3]]], [[[4]], [[5], [6]]]]),
    ),
}
"""Functions of ``parallel_cases``, and what they are given."""


@pytest.mark.parametrize(
    ("what", "kind", "way"),
    [
        (what, kind, way)
        for what, (_, kinds, *_) in OTHERS.items()
        for kind in kinds
        for way in WAYS
    ],
)
def test_so_they_are_however_ranks_train(pools, what, kind, way) -> None:
    function, _, steps, *more = OTHERS[what]
    case = Case(way=way, kind=kind, tied="alone" in what)
    ranks = pools[2].compute(getattr(parallel_cases, function), case, steps, *more)
    tolerance = 1e-5 if function == "train_in_precision" else 1e-9
    assert_same(ranks, train_alone(case, steps), tolerance)


def test_gathered_parameters_may_be_in_16_bits(pools) -> None:
    case, steps = Case(), UNEVEN[2][:1]
    (found, *_) = pools[2].compute(parallel_cases.train_in_precision, case, steps, torch.bfloat16)

    expected = train_alone(case, steps).sums[0]
    error = torch.cat([(found.sums[0][name] - expected[name]).flatten() for name in expected])
    assert error.norm() < 0.05 * torch.cat([one.flatten() for one in expected.values()]).norm()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_each_element_gets_noise_once_and_no_two_ranks_draw_the_same(pools, kind, size) -> None:
    ranks = pools[size].compute(parallel_cases.draw_noise, kind, seeded=size == 2)

    (first, second), _ = ranks[0]
    n = len(first)
    std = parallel_cases.SIGMA * 0.5 / parallel_cases.EXPECTED
    for steps, _ in ranks:
        assert torch.equal(steps[0], first)
        assert torch.equal(steps[1], second)
    for noise in (first, second):
        assert abs(float(noise.mean())) < 5 * std / n**0.5
        assert abs(float(noise.std()) / std - 1) < 5 / (2 * n) ** 0.5
        assert float((noise / std).pow(4).mean()) == pytest.approx(3, abs=5 * (96 / n) ** 0.5)
    # Each rank draws a part of each matrix, or of the whole; the parts do not repeat.
    assert abs(correlation(first, second)) < 5 / n**0.5
    matrices = [first[:20_000].view(200, 100), first[20_000:40_600].view(103, 200)]
    for matrix in matrices:
        rows = -(-len(matrix) // size)
        parts = [part.flatten() for part in matrix.split(rows)]
        for one, other in itertools.combinations(parts, 2):
            m = min(len(one), len(other))
            assert abs(correlation(one[:m], other[:m])) < 5 / m**0.5
    assert len(first.unique()) > 0.99 * n


@pytest.mark.parametrize("kind", KINDS_OF_RANKS)
def test_both_parts_of_complex_parameters_get_noise_once(pools, kind) -> None:
    ranks = pools[2].compute(parallel_cases.draw_noise, kind, seeded=True, dtype=torch.complex64)

    (noise, _), _ = ranks[0]
    std = parallel_cases.SIGMA * 0.5 / parallel_cases.EXPECTED
    for steps, _ in ranks:
        assert torch.equal(steps[0], noise)
    for part in (noise.real, noise.imag):
        assert abs(float(part.std()) / std - 1) < 5 / (2 * len(noise)) ** 0.5
    assert abs(correlation(noise.real, noise.imag)) < 5 / len(noise) ** 0.5


@pytest.mark.parametrize("kind", KINDS_OF_RANKS)
def test_the_global_seed_does_not_decide_the_noise_of_ranks(pools, kind) -> None:
    found = [pools[2].compute(parallel_cases.draw_noise, kind, seeded=False) for _ in range(2)]
    ((one, *_), _), *_ = found[0]
    ((other, *_), _), *_ = found[1]
    assert abs(correlation(one, other)) < 5 / len(one) ** 0.5
    assert len({secret for ranks in found for _, secret in ranks}) == 4


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_correlated_noise_of_ranks_is_that_of_one(pools, kind, noise) -> None:
    strategy = make_strategy(noise, steps=4, bands=3)
    ranks = pools[2].compute(parallel_cases.correlate_noise, kind, strategy)
    _, alone, kept_alone = parallel_cases.correlate_noise("alone", strategy)

    for drawn, released, _ in ranks:
        assert all(map(torch.equal, drawn, ranks[0][0]))
        for own, expected in zip(released, alone, strict=True):
            assert torch.allclose(own, expected, rtol=1e-10, atol=1e-12)
    n = alone[0].numel()
    assert sum(kept for *_, kept in ranks) == kept_alone == 2 * n  # two of three bands, in shards
    inverse = np.linalg.inv(matrix_of(strategy))
    std = parallel_cases.SIGMA * 0.5 / parallel_cases.EXPECTED
    rows = torch.stack(ranks[0][0]).numpy() / std
    expected = inverse @ inverse.T
    assert np.abs(rows @ rows.T / n - expected).max() < 6 * expected.max() * (2 / n) ** 0.5


@pytest.mark.parametrize(("kind", "way", "noise"), one_in(2, KINDS_OF_RANKS, WAYS, [None, *NOISES]))
def test_ranks_that_are_resumed_end_as_those_that_were_not_stopped(pools, kind, way, noise) -> None:
    strategy = noise and make_strategy(noise, steps=4, bands=3)
    ranks = pools[2].compute(parallel_cases.resume, Case(way=way, kind=kind), strategy)
    for rank, ((whole, other), (privacy, others), told) in enumerate(ranks):
        for name in whole:
            assert torch.equal(other[name], whole[name])
        noise, other_noise = (one["secrets"]["noise"] for one in (privacy, others))
        assert all(torch.equal(other_noise[name], noise[name]) for name in ("secret", "nonce"))
        assert (others["steps"], others["secrets"]["batches"]) == (4, 8)
        assert f"made with rank {1 - rank}, and this one with {rank};" in told


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def by_name(calls: list[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Return how many collectives of a name there are, and of how many elements in all."""
    sizes = {name: [n for other, n in calls if other == name] for name, _ in calls}
    return {name: (len(found), sum(found)) for name, found in sizes.items()}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_as_many_collectives_as_in_ordinary_training_and_those_by_which_ranks_agree(
    pools, kind, size
) -> None:
    case = Case("ours", "flash-bk", kind, tied=True)
    for ordinary, private in pools[size].compute(parallel_cases.record_collectives, case, [[0, 1]]):
        compared = [one for one in private if one[0] == "all-gather" and one[1] < 50]
        # What was used and settings, on each axis of the mesh; digests where sums are added up.
        assert len(compared) == {"fsdp": 2, "ddp": 2, "hsdp": 5}[kind]
        for one in compared:
            private.remove(one)
        found, expected = by_name(private), by_name(ordinary)
        assert {name: calls for name, (calls, _) in found.items()} == {
            name: calls for name, (calls, _) in expected.items()
        }
        for name, (_, elements) in expected.items():  # replicas add up no padding of shards
            assert 0.9 * elements < found[name][1] <= elements
        assert len(ordinary) >= 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "what"), [("ddp", "all-reduce"), ("fsdp", "reduce-scatter")])
def test_a_batch_in_parts_is_reduced_once(pools, kind, what, way) -> None:
    case = Case("ours", way, kind, tied=True)
    for ordinary, private in pools[2].compute(
        parallel_cases.record_collectives, case, [[0, 1], [2], []]
    ):
        assert by_name(private)[what] == by_name(ordinary)[what]


def test_one_whole_sum_is_there_at_a_time(pools) -> None:
    for counts, parameters in pools[2].compute(parallel_cases.hold_one_sum, Case()):
        assert counts == [1] * parameters


@pytest.mark.parametrize("kind", [*KINDS_OF_RANKS, pytest.param("hsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("bound", "max_grad_norm differs between rank 0 and rank 1: 0.5 and 1"),
        ("noise", "noise_multiplier differs between rank 0 and rank 1: 2 and 0.1"),
        ("size", "expected_batch_size differs between rank 0 and rank 1: 4 and 5"),
        ("steps", "the number of steps differs between rank 0 and rank 1: 0 and 1"),
        ("frozen", "differs between rank 0 and rank 1"),
        ("strategy", "the line of correlated noise, differs between rank 0 and rank 1"),
        ("a batch that is thrown away", "the line of correlated noise, differs"),
    ],
)
def test_ranks_that_disagree_are_refused_on_all(pools, change, told, kind) -> None:
    for way in WAYS:
        for error in pools[2].run(parallel_cases.take_a_step, Case(way=way, kind=kind), change):
            assert isinstance(error, RuntimeError)
            assert told in str(error)


@pytest.mark.parametrize(
    ("kind", "way", "counts"), one_in(2, KINDS_OF_RANKS, WAYS, [(4, 1), (4, 4), (1, 4)])
)
def test_samples_that_are_mixed_on_one_rank_are_refused(pools, kind, way, counts) -> None:
    """Under FSDP on all, since they wait for each other."""
    errors = pools[2].run(parallel_cases.mix_samples, Case(way=way, kind=kind), counts)
    for count, error in zip(counts, errors, strict=True):
        if count > 1:
            assert "depends on what" in str(error)
        else:
            assert kind == "ddp" or "another rank found that samples are mixed" in str(error)


@pytest.mark.parametrize(
    ("size", "function", "arguments", "told"),
    [
        (2, "take_a_step", (Case(), "parts"), "whether this part of a batch is the last differs"),
        (2, "skip_a_layer", ("flash",), "which layers ran, or their order, differs"),
        (2, "skip_a_layer", ("flash-bk",), "which layers ran, or their order, differs"),
        (2, "take_a_step", (Case(head="chunked"), "nothing"), "linear_cross_entropy keep=True"),
        pytest.param(
            *(4, "reshard_onto_fewer", (), "with a number for reshard_after_forward does not work"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_is_refused_on_all_ranks(pools, size, function, arguments, told) -> None:
    for error in pools[size].run(getattr(parallel_cases, function), *arguments):
        assert isinstance(error, RuntimeError | ValueError | UnsupportedError)
        assert told in str(error)


def test_sums_that_wait_are_reduced_in_the_step_at_the_latest(pools) -> None:
    for plain, late in pools[2].compute(parallel_cases.reduce_late, Case()):
        for name in plain:
            torch.testing.assert_close(late[name], plain[name], rtol=0, atol=1e-12)


def test_sums_of_a_batch_that_was_left_do_not_enter_the_next(pools) -> None:
    assert pools[2].compute(parallel_cases.forget_a_part, Case()) == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS_OF_RANKS)
def test_the_loop_in_the_documents_trains_on_several_ranks(pools, kind) -> None:
    loop = find_code(PRIVATE_TRAINING, "fully_shard")
    ranks = pools[2].compute(parallel_cases.run_loop, loop, kind)

    (before, after, batches), (_, other, others) = ranks
    assert 0 in batches + others  # of 24, each with a chance of 59 %
    for name in before:
        assert torch.equal(after[name], other[name])
        assert not torch.equal(after[name], before[name])


VARIANTS = ["plain", "frozen", "checkpoint"]


@pytest.mark.parametrize(
    ("variant", "kinds"),
    [
        *((variant, KINDS[at::3]) for at, variant in enumerate(VARIANTS)),
        *(pytest.param(variant, KINDS, marks=pytest.mark.slow) for variant in VARIANTS),
    ],
)
def test_every_kind_of_layer_is_exact_under_fsdp(pools, variant, kinds) -> None:
    for errors in pools[2].compute(parallel_cases.clip_layers, kinds, variant):
        assert len(errors) == 2 * len(kinds)
        assert max(errors) < 1e-12
