"""Cyclic and truncated Poisson sampling: what is drawn is what is accounted for."""

import copy
import math
import os
from functools import partial

import pytest
import torch
from one_call import seeded
from scipy.stats import binom
from small_models import take_step
from snapshots import assert_sentences, refusals_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import make_private
from dpprof.private.accounting.accountants import bound_epsilon, list_installed
from dpprof.private.accounting.budget import Spent, find_noise
from dpprof.private.accounting.schedule import Sampling
from dpprof.private.loop.poisson_batches import PoissonLoader
from dpprof.private.loop.public_numbers import find_public_numbers


@pytest.fixture(params=[20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def steps(request) -> int:
    """So many that a rate of a half is seen to be off by 0.018 (or 0.008), by five deviations."""
    return request.param


def draw(
    count: int, size: int, steps: int, rank: int = 0, **options
) -> tuple[Sampling, torch.Tensor]:
    """Return what is accounted for, and which sample each of many steps drew."""
    loader = DataLoader(TensorDataset(torch.arange(count)), batch_size=size, shuffle=True)
    numbers = find_public_numbers(loader, **options)
    made = PoissonLoader(
        loader, numbers, generator=seeded(3), rank=rank, ranks=options.get("ranks", 1)
    )
    made._parts.steps = steps
    drawn = torch.zeros(steps, count, dtype=torch.bool)
    for step, indices in enumerate(made._parts):
        if not made._parts.drawn.popleft().is_empty:
            drawn[step, indices] = True
    return numbers.sampling, drawn


def near(found: torch.Tensor, expected: float, count: int) -> bool:
    return bool(((found - expected).abs() <= 5 * math.sqrt(0.25 / count)).all())


def test_a_fork_draws_batches_of_its_own(monkeypatch) -> None:
    """Epsilon of both counts draws that are independent: twice the same batches cost more."""
    data = DataLoader(TensorDataset(torch.arange(200)), batch_size=100, shuffle=True)
    parts = PoissonLoader(data, find_public_numbers(data))._parts
    parts.steps, state = 2, parts.generator.get_state()
    (mine, _), parent = parts, os.getpid()
    parts.generator.set_state(state)
    assert next(iter(parts)) == mine
    parts.generator.set_state(state)
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    first, second = parts
    assert first not in (mine, second)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cyclic_step_draws_from_its_fold_alone_and_each_sample_at_the_stated_rate(
    rank, steps
) -> None:
    sampling, drawn = draw(12, 2, steps, rank, folds=3, ranks=2)

    assert sampling == Sampling(0.5, folds=3)
    for fold in range(3):
        own = [at for at in range(fold, 12, 3) if (at // 3) % 2 == rank]
        of_fold = drawn[fold::3]
        others = [at for at in range(12) if at not in own]
        assert not of_fold[:, others].any()
        assert near(of_fold[:, own].double().mean(0), 0.5, len(of_fold))
        both = (of_fold[:, own[0]] & of_fold[:, own[1]]).double().mean()
        assert near(both, 0.25, len(of_fold))  # independently
    assert int(drawn.sum(0).max()) <= sampling.count_turns(steps)


def test_a_truncated_step_keeps_a_uniform_subset_of_what_it_drew(steps) -> None:
    n, rate, most = 10, 0.4, 5
    sampling, drawn = draw(n, 4, steps, truncated_batch_size=most)

    assert sampling == Sampling(rate, 1, most, n)
    sizes = drawn.sum(1)
    for size in range(n):
        expected = binom.pmf(size, n, rate) if size < most else 0.0
        expected = binom.sf(most - 1, n, rate) if size == most else expected
        assert near((sizes == size).double().mean(), expected, steps)
    # Given the size, all subsets are as likely.
    full = drawn[sizes == most].double()
    assert near(full.mean(0), most / n, len(full))
    pairs = full.T @ full / len(full)
    off = pairs[~torch.eye(n, dtype=torch.bool)]
    assert near(off, most * (most - 1) / (n * (n - 1)), len(full))


def test_a_limit_of_one_and_folds_of_one_sample_are_drawn_rightly(steps) -> None:
    sampling, drawn = draw(4, 2, steps, truncated_batch_size=1, folds=2)
    assert sampling == Sampling(1.0, 2, 1, 2)
    assert bool((drawn.sum(1) == 1).all())
    assert near(drawn[::2, 0].double().mean(), 0.5, steps // 2)

    sampling, drawn = draw(4, 1, 4, folds=4)
    assert torch.equal(drawn, torch.eye(4, dtype=torch.bool))


def test_what_cannot_be_drawn_or_accounted_for_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=4, shuffle=True)
    assert_sentences("clipping/sampling", refusals_of(partial(find_public_numbers, loader)))


def prepare(count: int = 12, size: int = 3, seed: int = 5, **options):
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = TensorDataset(torch.randn(count, 3, generator=seeded(1)), torch.arange(count))
    usual = {"max_grad_norm": 1.0, "delta": 1e-3, "accountant": "rdp", "check": False}
    generators = {"sampling_generator": seeded(seed), "noise_generator": seeded(9)}
    if "epsilon" not in options:
        usual["noise_multiplier"] = 1.0
    loader = DataLoader(data, batch_size=size, shuffle=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, sgd, loader, **usual | generators | options)


def prepare_in_parts():
    return prepare(200, 100, max_batch_size=80, noise_generator=None)


def train(private, steps: int) -> list[list[int]]:
    """Take so many steps; returns the samples of each."""
    taken = []
    while len(taken) < steps:
        for x, at in private.data_loader:
            taken.append(at.tolist())
            take_step(private.optimizer, private.model(x).square().mean(1))
            if len(taken) == steps:
                break
    return taken


def test_a_state_without_secrets_draws_other_batches_also_where_a_generator_is_given() -> None:
    first, resumed = prepare(), prepare()
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))

    assert train(first, 4) != train(resumed, 4)


def test_a_generator_that_two_trainings_are_given_draws_other_batches_for_each() -> None:
    """What both release of a sample is counted as if its draws were independent."""
    runs = []
    for _ in range(2):
        shared = seeded(5)
        first, second = (prepare(sampling_generator=shared) for _ in range(2))
        runs.append((train(first, 4), train(second, 4)))

    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize("parts_before", [2, 3])
def test_a_fork_that_leaves_its_first_batch_draws_none_of_the_other_process(
    monkeypatch, parts_before
) -> None:
    parent, child = (prepare_in_parts() for _ in range(2))
    drawn, process = train(parent, 8), os.getpid()
    assert train(child, parts_before) == drawn[:parts_before]  # a batch has two parts
    saved = copy.deepcopy(parent.state_dict(exact=True))
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    for _ in range(2):
        next(iter(child.data_loader))
    own = train(child, 4)
    assert not [part for part in own if part in drawn]
    child.load_state_dict(saved, exact=True)
    again = prepare_in_parts()
    again.load_state_dict(saved, exact=True)
    assert train(child, 2) == train(again, 2)


@pytest.mark.parametrize(
    ("change", "is_alike"),
    [({"count": 13}, False), ({"count": 13, "sample_rate": 0.25}, True), ({"folds": 3}, False)],
)
def test_ranks_compare_how_they_draw_and_the_fold(change, is_alike) -> None:
    mine, other = prepare().optimizer, prepare(**change).optimizer

    assert (mine._settings_of_ranks() == other._settings_of_ranks()) is is_alike
    before = other._settings_of_ranks()
    other._fold = 1
    assert other._settings_of_ranks() != before


def test_the_rest_of_a_batch_that_is_discarded_is_not_handed_out() -> None:
    private, sizes = prepare(size=12, max_batch_size=4), []
    for _ in range(2):
        for x, _ in private.data_loader:
            sizes.append(len(x))
            private.optimizer.backward(private.model(x).square().mean(1))
            if len(sizes) == 2:
                private.optimizer.discard()
            else:
                private.optimizer.step()

    assert (sizes, private.optimizer.steps) == ([4] * 5, 1)


def test_what_was_spent_counts_the_steps_of_a_fold() -> None:
    private = prepare(folds=4)
    train(private, 10)

    assert private.optimizer.steps == private.spent.steps == 10
    assert private.spent.history == [(1.0, 1.0, 3)]  # folds 0 and 1 had three
    assert private.epsilon_spent() == bound_epsilon([(1.0, 1.0, 3)], 1e-3, "rdp")
    assert (
        "each sample of its fold, which is every 4th sample of the data, with" in private.guarantee
    )


def test_whoever_steps_on_one_fold_alone_spends_as_much_and_no_more_than_planned() -> None:
    private = prepare(folds=4, epsilon=20.0, steps=8)

    def step_on_the_first_fold() -> None:
        for turn in range(20):
            for x, _ in private.data_loader:
                if turn % 4 == 0:
                    take_step(private.optimizer, private.model(x).square().mean(1))
                else:
                    private.optimizer.discard()
                break

    with pytest.raises(RuntimeError, match=r"spent for samples of fold 0: 2 steps draw from a f"):
        step_on_the_first_fold()
    assert private.spent.steps == 2
    assert private.spent.history == [(private.optimizer.noise_multiplier, 1.0, 2)]
    assert private.epsilon_spent() <= 20


def test_a_run_that_stops_within_a_round_of_folds_goes_on_there() -> None:
    options = {"folds": 3, "truncated_batch_size": 4}
    whole = prepare(**options)
    drawn = train(whole, 8)
    first = prepare(**options)
    train(first, 5)
    state = copy.deepcopy(first.state_dict(exact=True))

    exact = prepare(seed=6, **options)
    exact.load_state_dict(state, exact=True)
    assert train(exact, 3) == drawn[5:]
    assert torch.equal(exact.model.weight, whole.model.weight)
    assert exact.spent.history == whole.spent.history == [(1.0, 0.75, 3)]

    fresh = prepare(seed=6, **options)
    fresh.load_state_dict(state)
    assert all(at % 3 == (5 + step) % 3 for step, one in enumerate(train(fresh, 3)) for at in one)
    assert fresh.spent.history == whole.spent.history

    back = copy.deepcopy(state)
    first_again = prepare(**options)
    first_again.load_state_dict(back)
    train(first_again, 1)
    first_again.load_state_dict(back)  # what was taken since counts: a second step of the last fold
    assert first_again.spent.steps == 6
    assert first_again.spent.history == [(1.0, 0.75, 2)]
    train(first_again, 1)
    assert first_again.spent.history == [(1.0, 0.75, 3)]


@pytest.mark.parametrize(
    ("change", "told"),
    [({"folds": 4}, "this state was saved with"), ({"folds": 3}, "with truncated batch size: 4")],
)
def test_a_state_of_another_sampling_is_refused(change, told) -> None:
    saved = prepare(folds=3, truncated_batch_size=4)
    train(saved, 1)
    with pytest.raises(ValueError, match=told):
        prepare(**change).load_state_dict(saved.state_dict(exact=True))
    spent = Spent(Sampling(0.75, 3), 1e-3, "rdp")
    with pytest.raises(ValueError, match=r"has truncated_batch_size \(of a rank\) 4, and .* None"):
        spent.load_state_dict(saved.spent.state_dict())
    with pytest.raises(ValueError, match="what was spent has folds 3, and this training 4"):
        Spent(Sampling(0.75, 4), 1e-3, "rdp").load_state_dict(saved.spent.state_dict())
    with pytest.raises(ValueError, match="has truncated_batch_size, of so many samples,"):
        saved.spent.continue_with(spent)


def test_rounds_with_other_folds_add_up_what_one_sample_may_spend() -> None:
    first = prepare(folds=4)
    train(first, 5)
    first.remove()
    second = prepare(folds=2, spent=first.spent)
    train(second, 3)

    assert sorted(second.spent.history) == [(1.0, 0.5, 2), (1.0, 1.0, 2)]
    assert first.spent.epsilon() == second.spent.epsilon()


def test_truncation_costs_epsilon_the_more_the_nearer_it_is_to_the_mean() -> None:
    history, whole = [(1.0, 0.01, 1000)], Sampling(0.01)
    bounds = {
        accountant: [
            bound_epsilon(history, 1e-5, accountant, Sampling(0.01, 1, most, 10_000))
            for most in (200, 170, 130)
        ]
        for accountant in list_installed()
    }

    for accountant, (far, nearer, near_mean) in bounds.items():
        plain = bound_epsilon(history, 1e-5, accountant, whole)
        assert plain * (1 - 1e-9) <= far <= plain * 1.001
        assert far < nearer < near_mean
    assert bounds["rdp"][2] == bounds["prv"][2] == math.inf
    if "pld" in bounds:
        assert bounds["pld"] == pytest.approx([1.82824, 1.82824, 3.68407], rel=1e-4)
    # Of 1,000 steps one is cut with probability tau: delta has room for tau (1 + e^epsilon) less.
    tau = 1000 * binom.sf(170, 10_000, 0.01)
    epsilon = bounds["rdp"][1]
    exact = bound_epsilon(history, 1e-5 - tau * (1 + math.exp(epsilon)), "rdp")
    assert exact <= epsilon <= exact * 1.001


@pytest.mark.parametrize("accountant", ["rdp", "prv", "pld"])
def test_what_is_far_or_cut_to_one_sample_is_never_told_as_if_it_were_whole(accountant) -> None:
    if accountant not in list_installed():
        pytest.skip("dp-accounting is not installed")
    sampling = Sampling(1.0, 1, 1, 2)  # always cut, to one of two
    whole = bound_epsilon([(1.0, 1.0, 1)], 1e-5, accountant)
    for noise, steps in [(0.01, 1), (1.0, 10_000), (1.0, 1)]:
        told = bound_epsilon([(noise, 1.0, steps)], 1e-5, accountant, sampling)
        assert math.isinf(told) or (accountant == "pld" and steps == 1 and told > whole)


def test_noise_of_a_budget_keeps_it_for_the_sampling_that_is_drawn() -> None:
    cyclic, cut = Sampling(0.04, folds=4), Sampling(0.01, 1, 175, 10_000)
    noise = [find_noise(3.0, 1e-5, 1000, one, "rdp") for one in (Sampling(0.01), cut, cyclic)]

    assert noise[0] < noise[1] < 1.01 * noise[0]
    assert 2.99 <= bound_epsilon([(noise[1], 0.01, 1000)], 1e-5, "rdp", cut) <= 3
    assert 2.99 <= bound_epsilon([(noise[2], 0.04, 250)], 1e-5, "rdp") <= 3
    with pytest.raises(ValueError, match="no noise multiplier keeps epsilon 3 at delta 1e-05 for"):
        find_noise(3.0, 1e-5, 1000, Sampling(0.01, 1, 100, 10_000), "rdp")


@pytest.mark.parametrize(("n", "rate", "most"), [(2, 1.0, 1), (12, 0.2, 4)])
def test_one_truncated_step_spends_no_more_than_told_beside_opposite_samples(n, rate, most) -> None:
    """By the densities of a step's release, where a sample of 1 stands or one of zero."""
    others = -1.0
    noise, x = 1.0, torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    densities = [torch.zeros_like(x), torch.zeros_like(x)]
    for drawn in range(n):  # of the other samples
        of_others = float(binom.pmf(drawn, n - 1, rate))
        stays = min(1.0, most / (drawn + 1))
        ways = [(1 - rate, min(drawn, most), 0), (rate * stays, min(drawn, most - 1), 1)]
        ways += [(rate * (1 - stays), most, 0)]
        for place, own in enumerate((1.0, 0.0)):
            for share, kept, is_in in ways:
                away = (x - own * is_in - others * kept) / noise
                densities[place] += of_others * share * torch.exp(-away.square() / 2)
    with_it, without = (density / density.sum() for density in densities)
    for accountant in list_installed():
        for delta in (1e-2, 1e-5):
            sampling = Sampling(rate, 1, most, n)
            epsilon = bound_epsilon([(noise, rate, 1)], delta, accountant, sampling)
            for one, other in ((with_it, without), (without, with_it)):
                if math.isfinite(epsilon):
                    assert float((one - math.exp(epsilon) * other).clamp(min=0).sum()) <= delta
