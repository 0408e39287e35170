"""``PrivateTrainer`` on two ranks trains what one process trains with the joint batches."""

from collections.abc import Iterator

import pytest
import torch
from documents import TRAINERS, find_code
from rank_pool import RankPool
from small_models import gradients, one_by_one

pytest.importorskip("transformers")

import parallel_trainer

LOOP = find_code(TRAINERS, "Accelerator")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Of its own: its processes act as those of ``torchrun``."""
    made = RankPool(2)
    yield made
    made.close()


@pytest.mark.parametrize("shards", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_sums_the_clipped_gradients_of_all_ranks(pool, tmp_path, shards) -> None:
    ranks = pool.compute(parallel_trainer.train, tmp_path, 0.0, max_steps=1, shards=shards)
    for rank, one in enumerate(ranks):
        assert all(sample % 2 == rank for sample in one.drawn[0])  # each has samples of its own
        assert torch.equal(one.before, ranks[0].before)
        assert torch.equal(one.after, ranks[0].after)
        assert one.history == [(0.0, 1 / 3, 1)]
    chosen = [sample for one in ranks for sample in one.drawn[0]]
    model, rows = parallel_trainer.build(), parallel_trainer.draw()
    batch = [torch.stack([rows[at][name] for at in chosen]) for name in ("input_ids", "labels")]

    def one_loss(ids, labels):
        return model(input_ids=ids, labels=labels).loss

    _, expected, _ = one_by_one(one_loss, model, batch, bound=parallel_trainer.BOUND)
    found = (ranks[0].before - ranks[0].after).double() * parallel_trainer.EXPECTED

    assert len(chosen) > 2
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("shards", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_user_lies_on_one_rank_and_is_clipped_as_one(pool, tmp_path, shards) -> None:
    ids = [0, 1, 0, 2, 1, 0, 3, 2, 0, 4, 5, 4]
    settings = {"privacy": {"unit": "user", "users": ids, "samples_of_user": 2}, "shards": shards}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    ranks = pool.compute(parallel_trainer.train, tmp_path, 0.0, max_steps=1, **settings)
    model, rows = parallel_trainer.build(), parallel_trainer.draw()
    users: dict[int, list[int]] = {}
    for rank, one in enumerate(ranks):
        assert torch.equal(one.after, ranks[0].after)
        assert one.history == [(0.0, 4 / 6, 1)]
        for sample in one.drawn[0]:
            assert ids[sample] % 2 == rank  # the users in turn
            users.setdefault(ids[sample], []).append(sample)
    assert all(len(own) == min(2, ids.count(user)) for user, own in users.items())

    # A user's loss is the mean of his samples', which is that of a batch of them.
    samples = []
    for own in users.values():
        batch = {name: torch.stack([rows[at][name] for at in own]) for name in rows[0]}
        model(**batch).loss.backward()
        samples.append(gradients(model))
        model.zero_grad()
    norms = torch.stack([gradient.norm() for gradient in samples])
    expected = (parallel_trainer.BOUND / norms).clamp(max=1) @ torch.stack(samples)
    moved = (ranks[0].before - ranks[0].after).double() * parallel_trainer.EXPECTED

    assert (norms > parallel_trainer.BOUND).any()
    assert (moved - expected).norm() <= 1e-5 * expected.norm()


def test_the_loop_under_accelerate_trains_in_one_process() -> None:
    before, after, epsilon = parallel_trainer.run_loop(LOOP)
    assert not torch.equal(before, after)
    assert 2.9 < epsilon <= 3


@pytest.mark.slow
def test_the_loop_under_accelerate_trains_on_several_ranks(pool) -> None:
    (before, after, epsilon), other = pool.compute(parallel_trainer.run_loop, LOOP)
    assert torch.equal(other[1], after)
    assert not torch.equal(before, after)
    assert 2.9 < epsilon == other[2] <= 3


@pytest.mark.slow
def test_noise_is_added_once_and_a_killed_run_ends_with_the_same_bits(pool, tmp_path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    whole = pool.compute(parallel_trainer.train, tmp_path, 1.0, **options)
    silent = pool.compute(parallel_trainer.train, tmp_path / "silent", 0.0, max_steps=1)
    first = pool.compute(parallel_trainer.train, tmp_path / "first", 1.0, max_steps=1)
    assert first[0].drawn == silent[0].drawn
    noise = (first[0].after - silent[0].after) * parallel_trainer.EXPECTED / parallel_trainer.BOUND
    assert float(noise.std()) == pytest.approx(1, abs=5 / (2 * len(noise)) ** 0.5)
    for name in ("checkpoint-1", "checkpoint-2"):
        again = pool.compute(parallel_trainer.train, tmp_path, 1.0, name)
        for one, other in zip(again, whole, strict=True):
            assert torch.equal(one.after, whole[0].after)
            assert one.history == other.history == [(1.0, 1 / 3, 3)]
            assert one.drawn == other.drawn[int(name[-1]) :]
    assert whole[0].logged[-1]["epsilon"] == whole[1].logged[-1]["epsilon"] > 0


def test_ranks_draw_from_one_fold_at_a_time_and_cut_their_own_batches(pool, tmp_path) -> None:
    privacy = {"folds": 2, "truncated_batch_size": 2, "expected_batch_size": 1}
    ranks = pool.compute(parallel_trainer.train, tmp_path, 1.0, max_steps=6, privacy=privacy)
    assert torch.equal(ranks[0].after, ranks[1].after)
    for rank, one in enumerate(ranks):
        for step, drawn in enumerate(one.drawn):
            assert len(drawn) <= 1
            assert all(at % 2 == step % 2 and (at // 2) % 2 == rank for at in drawn)
        assert [(noise, steps) for noise, _, steps in one.history] == [(1.0, 3)]
    assert {at for one in ranks for drawn in one.drawn for at in drawn} != set()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("include_num_input_tokens_seen", {"include_num_input_tokens_seen": "all"}),
        ("save_strategy", {"save_strategy": "steps", "shards": True}),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(pool, tmp_path, name, options) -> None:
    for error in pool.run(parallel_trainer.train, tmp_path, 1.0, max_steps=1, **options):
        assert f"{name} is not allowed" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_sharded_model_trains_as_a_replicated_one(pool, tmp_path, noise) -> None:
    """Over steps with other numbers of parts on each rank; noise is drawn for other elements."""
    options = {"max_steps": 9}
    (one, other), (plain, _) = (
        pool.compute(parallel_trainer.train, tmp_path, noise, shards=shards, **options)
        for shards in (True, False)
    )
    assert any(len(a) != len(b) for a, b in zip(one.drawn, other.drawn, strict=True))
    assert torch.equal(one.after, other.after)
    assert one.history == plain.history == [(noise, 1 / 3, 9)]
    if noise == 0:
        torch.testing.assert_close(one.after, plain.after, rtol=0, atol=1e-5)
    else:
        moved = (one.after - one.before) * parallel_trainer.EXPECTED / parallel_trainer.BOUND / 3
        assert float(moved.std()) == pytest.approx(1, abs=0.15)  # nine steps of noise, mostly


def test_ranks_whose_data_are_in_another_order_are_refused(pool) -> None:
    """A sample would lie on both, and count twice."""
    told = "the data, or their order, differs between rank 0 and rank 1"
    for spread in ("in another order", "in halves"):
        for error in pool.run(parallel_trainer.step_on_data, spread):
            assert isinstance(error, RuntimeError)
            assert told in str(error)
    assert pool.compute(parallel_trainer.step_on_data, "alike") == [1, 1]


def test_batches_of_another_rank_are_not_drawn_again(pool) -> None:
    for error in pool.run(parallel_trainer.load_batches_of_first):
        if isinstance(error, Exception):
            assert "saved with rank: 0, and here there are 1" in str(error)
        else:
            assert error == 0  # on the first rank
