"""A bound that follows a quantile: its noise and budget, where it goes, and how it is resumed."""

import copy
import math

import numpy as np
import pytest
import torch
from one_call import BATCH, SAMPLES, Model, prepare, train

from dpprof.private.accounting.accountants import bound_epsilon
from dpprof.private.noise.quantile import QuantileBound

NOISE = 0.5  # a tenth of a batch of 6 is 0.6


def move(bound: QuantileBound, at: float, step: int, *parts: torch.Tensor) -> float:
    """Count the parts of a batch, release that, and return the next bound."""
    for part, norms in enumerate(parts):
        bound.count(norms, at)
        bound.close_part(is_first=not part)
    bound.release(at, step)
    return bound.move(at)


def test_sum_and_count_together_are_as_private_as_the_noise_that_is_counted() -> None:
    """Scaled by their noise, a sample moves sum and count by 1 / noise (L2)."""
    bound = QuantileBound(0.5, BATCH)
    of_sum = bound.split(NOISE)

    assert bound.count_noise == BATCH / 20
    assert math.hypot(1 / of_sum, 0.5 / bound.count_noise) == pytest.approx(1 / NOISE)
    assert bound.join(of_sum) == pytest.approx(NOISE, rel=1e-11)
    assert bound.join(of_sum) >= NOISE
    assert of_sum > NOISE


def test_a_training_counts_both_and_adds_the_larger_noise() -> None:
    model = Model().double()
    private = prepare(model, bound_quantile=0.5, noise_multiplier=NOISE, delta=1e-3)
    train(private, model)

    of_sum = QuantileBound(0.5, BATCH).split(NOISE)
    assert private.optimizer.noise_multiplier == of_sum
    [(counted, rate, steps)] = private.spent.history
    assert (rate, steps) == (BATCH / SAMPLES, 8)
    assert counted == pytest.approx(NOISE)
    expected = bound_epsilon([(NOISE, rate, 8)], 1e-3, "prv")
    assert private.epsilon_spent() == pytest.approx(expected, rel=1e-6)
    assert "shorter: their count has Gaussian noise of standard deviation 0.3, and" in (
        private.guarantee
    )


def test_without_noise_the_bound_goes_to_the_quantile() -> None:
    """By the formula of the source, from the norms of each step's samples."""
    bound, norms = QuantileBound(0.25, 100), torch.arange(1.0, 101)
    bound.count_noise, at = 0.0, 90.0
    for step in range(400):
        within = sum(min(max((1.1 * at - norm) / (0.2 * at), 0), 1) for norm in norms.tolist())
        expected = at * math.exp(-0.2 * (within / 100 - 0.25))
        at = move(bound, at, step, norms[:30], norms[30:])
        assert at == pytest.approx(expected)

    assert 24 <= at <= 27


def test_the_noise_of_counts_is_normal_and_of_its_size() -> None:
    bound = QuantileBound(0.5, 100)
    drawn = []
    for step in range(4000):
        moved = move(bound, 1.0, step, 2 * torch.ones(100))  # none is within: a count of -50
        drawn.append(-math.log(moved) / 0.2 * 100 + 50)  # quantile 0.5 is 50

    assert np.mean(drawn) == pytest.approx(0, abs=0.3)
    assert np.std(drawn) == pytest.approx(5, rel=0.05)
    assert np.mean(np.abs(drawn) < 5) == pytest.approx(0.683, abs=0.03)


def test_norms_that_are_not_finite_are_above_each_bound() -> None:
    bound = QuantileBound(0.5, 4)
    bound.count(torch.tensor([math.nan, math.inf, 0.1, 0.2]), 1.0)
    assert bound._of_part == 0  # two within, two above


def test_last_digits_of_norms_do_not_move_a_count() -> None:
    """Norms at the bound itself, each up or down by rounding, as company makes them."""
    counts = []
    for direction in (0.0, math.inf):
        bound = QuantileBound(0.5, 1000)
        bound.count(torch.nextafter(torch.full((1000,), 0.7), torch.tensor(direction)), 0.7)
        counts.append(bound._of_part)

    assert abs(counts[0] - counts[1]) <= 1e-3  # 1000 where samples count whole


@pytest.mark.parametrize("norm", [0.0, 0.9, 0.95, 1.0, 1.1, 1e30, math.nan])
@pytest.mark.parametrize("bound", [1e-38, 1.0, 1e33])
def test_a_sample_moves_a_count_by_at_most_a_half(norm, bound) -> None:
    alone = QuantileBound(0.5, 4)
    alone.count(torch.tensor([norm * bound]).double(), bound)
    assert abs(alone._of_part) <= 0.5


def test_the_bound_moves_once_for_each_batch_however_many_parts_it_has() -> None:
    bounds = []
    for most in (None, 2):
        model = Model().double()
        private = prepare(model, bound_quantile=0.5, noise_multiplier=0.0, max_batch_size=most)
        private.optimizer.quantile.count_noise = 0.0
        train(private, model)
        bounds.append(private.optimizer.max_grad_norm)

    assert bounds[0] == pytest.approx(bounds[1])
    assert bounds[0] != 0.5


def test_equal_counts_get_equal_noise_and_others_another() -> None:
    moved = []
    for norms in (torch.zeros(4), torch.zeros(4), torch.zeros(3)):
        bound = QuantileBound(0.5, 6)
        bound.keys.secret = bound.keys.nonce = bytes(32)
        moved.append(math.log(move(bound, 1.0, 3, norms)) / -0.2 * 6 - (len(norms) / 2))

    assert moved[0] == moved[1]
    assert moved[0] != pytest.approx(moved[2], abs=1e-6)


def test_a_state_that_is_loaded_anew_draws_other_noise_for_equal_counts() -> None:
    """Else equal bounds would tell that the counts of two batches are equal."""
    model = Model().double()
    private = prepare(model, bound_quantile=0.5, noise_multiplier=NOISE, sample_rate=1.0)
    state, bounds = copy.deepcopy(private.state_dict(exact=True)), []
    for exact in (False, False, True, True):
        private.load_state_dict(state, exact=exact)
        train(private, model, epochs=1)
        bounds.append(private.optimizer.max_grad_norm)

    assert len(set(bounds)) == 3
    assert bounds[2] == bounds[3]


def fail_in_a_hook(optimizer, _model) -> None:
    fails = optimizer.original_optimizer.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    fails.remove()


def lose_the_batch(optimizer, model) -> None:
    optimizer.discard()
    model.zero_grad()


def take_batch(private, model, lose=None) -> torch.Tensor:
    """Clip the parts of a batch, and step, or lose it at the last one; return its norms."""
    norms, (_, optimizer, loader) = [], private
    for batch in loader:
        optimizer.backward(model.losses, *batch)
        norms.append(optimizer.clipping.sample_norms)
        if lose is not None and loader.is_last_part:
            lose(optimizer, model)
        else:
            optimizer.step()
            model.zero_grad()
        if loader.is_last_part:
            break
    return torch.cat(norms)


@pytest.mark.parametrize("lose", [fail_in_a_hook, lose_the_batch])
def test_a_count_is_of_one_batch_whatever_became_of_those_before(lose) -> None:
    model = Model().double()
    private = prepare(model, bound_quantile=0.5, noise_multiplier=0.0, max_batch_size=2)
    private.optimizer.quantile.count_noise = 0.0
    for _ in range(3):
        take_batch(private, model, lose)
    before, expected = private.optimizer.max_grad_norm, QuantileBound(0.5, BATCH)
    expected.count_noise = 0.0
    norms = take_batch(private, model)

    assert (before == 0.5) == (lose is lose_the_batch)  # what a step released is used
    assert len(norms) > 2
    assert private.optimizer.max_grad_norm == pytest.approx(move(expected, before, 1, norms))


def test_an_accountant_that_reads_the_noise_of_the_sum_is_refused() -> None:
    model = Model().double()
    private = prepare(model, bound_quantile=0.5, noise_multiplier=NOISE)
    with pytest.raises(ValueError, match="a step counts as counted_noise_multiplier"):
        private.optimizer.attach_step_hook(lambda _: None)
