"""What follows from the number of samples, what is public, and trainings in rounds."""

import copy
import functools
import math

import pytest
import torch
from documents import find_all_code
from one_call import seeded
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.data_loader import DPDataLoader
from scipy.special import log_ndtr, ndtr
from small_models import take_step
from snapshots import assert_sentences, refusals_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import UnsupportedError, make_private, numbers_of_opacus
from dpprof.private.accounting import budget

D = 50
PUBLIC = {"max_grad_norm": 1.0, "delta": 1e-5, "check": False}


@pytest.fixture
def searched_once(monkeypatch) -> None:
    """Search for the noise of a budget once, however many rounds have it."""
    search = functools.cache(budget.find_noise)
    monkeypatch.setattr(budget, "find_noise", search)


def load(length: int):
    return DataLoader(TensorDataset(torch.ones(length, D)), batch_size=4)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def prepare(length: int, *, batch_size: int = 4, missing: int | None = None, **options):
    """Make the training of a linear model private, on samples of which one may be missing."""
    kept = [at for at in range(length) if at != missing]
    x = torch.ones(length, D)[kept] * torch.arange(1.0, length + 1)[kept, None]
    model = nn.Linear(D, 1, bias=False)
    nn.init.zeros_(model.weight)
    options = PUBLIC | {"noise_multiplier": 8.0} | options
    options.setdefault("noise_generator", seeded(7))
    loader = DataLoader(TensorDataset(x), batch_size=batch_size, shuffle=True)
    return make_private(model, sgd(model), loader, **options)


def release(private) -> torch.Tensor:
    """Return what one step of losses that are all zero releases: the averaged noise."""
    for (x,) in private.data_loader:
        take_step(private.optimizer, private.model(x)[:, 0] * 0)
        return private.model.weight.detach().clone()
    raise AssertionError("no batch")


PAIRS = [
    *((8, 4, 7), (8, 4, 0), (9, 4, 8), (7, 3, 6), (7, 2, 3), (13, 5, 12), (13, 5, 0), (12, 4, 11)),
    *((12, 12, 3), (5, 4, 4), (2, 1, 1), (16, 8, 15), (17, 8, 16), (17, 4, 9), (31, 10, 30)),
    *((31, 7, 0), (33, 32, 32), (32, 32, 31), (100, 9, 99), (101, 25, 50)),
]


@pytest.mark.parametrize("public", ["samples", "sample_rate"])
@pytest.mark.parametrize(("samples", "batch_size", "missing"), PAIRS)
def test_one_sample_less_changes_neither_noise_nor_divisor(
    samples, batch_size, missing, public
) -> None:
    given = {"samples": 40} if public == "samples" else {"sample_rate": 0.3}
    given |= {"batch_size": batch_size}
    both = prepare(samples, **given), prepare(samples, missing=missing, **given)

    assert both[0].data_loader.numbers == both[1].data_loader.numbers
    assert len(both[0].data_loader) == len(both[1].data_loader)
    assert both[0].optimizer.expected_batch_size == batch_size
    assert torch.equal(*map(release, both))
    assert "number of steps were given: this holds if none was computed" in both[0].guarantee


def test_by_default_the_divisor_is_the_loaders_own_batch_size() -> None:
    both = [prepare(samples) for samples in (8, 7)]

    assert torch.equal(*map(release, both))
    assert [one.data_loader.sample_rate for one in both] == [4 / 8, 4 / 7]
    assert [len(one.data_loader) for one in both] == [2, 2]


def test_the_guarantee_says_what_is_public() -> None:
    private = prepare(8, noise_multiplier=3.0)

    assert "probability 0.5," in private.guarantee
    assert "at most 1 (L2)" in private.guarantee
    assert "standard deviation 3 and is divided by 4." in private.guarantee
    assert "The number of samples, 8, is public" in private.guarantee
    assert "is public" not in prepare(8, samples=8).guarantee


def test_a_batch_size_that_is_given_is_drawn_and_divided_by() -> None:
    private = prepare(10, expected_batch_size=2.5)

    assert private.data_loader.sample_rate == 0.25
    assert private.optimizer.expected_batch_size == 2.5
    assert len(private.data_loader) == 4


def test_more_samples_in_a_batch_than_there_are_are_all_drawn() -> None:
    private = prepare(3, batch_size=8)
    batch = next(iter(private.data_loader))

    assert len(batch[0]) == 3
    assert (private.data_loader.sample_rate, private.optimizer.expected_batch_size) == (1.0, 8)


@pytest.mark.parametrize("rate", [0.3, 1 / 3, 4 / 7, 1 / 49, 0.999])
def test_a_public_rate_is_drawn_planned_and_counted_as_it_is(rate) -> None:
    """By the accountant that takes seconds for one of the rates."""
    accountant, book = ("prv", PRVAccountant()) if rate == 1 / 3 else ("rdp", RDPAccountant())
    budget = {"noise_multiplier": None, "epsilon": 2.0, "steps": 30, "accountant": accountant}
    private = prepare(20, sample_rate=rate, **budget)
    release(private)
    book.history = [(private.optimizer.noise_multiplier, rate, 30)]

    assert 1.98 <= book.get_epsilon(delta=1e-5) <= 2.0
    assert private.spent.history == [(private.optimizer.noise_multiplier, rate, 1)]
    assert len(private.data_loader) == {0.3: 4, 1 / 3: 3, 4 / 7: 2, 1 / 49: 49, 0.999: 2}[rate]


def test_numbers_out_of_their_range_are_refused() -> None:
    assert_sentences("clipping/numbers", refusals_of(functools.partial(prepare, 8)))


def test_a_batch_smaller_than_one_sample_has_a_public_number_of_samples() -> None:
    assert prepare(8, expected_batch_size=0.4, sample_rate=1.0).data_loader.numbers.samples == 1


def test_a_dataset_without_samples_is_refused() -> None:
    model, nothing = nn.Linear(D, 1), DataLoader(TensorDataset(torch.zeros(0, D)), batch_size=2)
    with pytest.raises(ValueError, match="the dataset has no samples"):
        make_private(model, sgd(model), nothing, noise_multiplier=1.0, **PUBLIC)


def make_from_opacus_loader(**given):
    model = nn.Linear(D, 1)
    loader = DPDataLoader(TensorDataset(torch.zeros(8, D)), sample_rate=0.25)
    return make_private(model, sgd(model), loader, noise_multiplier=1.0, **PUBLIC, **given)


def test_numbers_of_opacus_own_loader_follow_from_the_data_unless_both_are_given() -> None:
    assert "The number of samples, 8, is public" in make_from_opacus_loader().guarantee
    given = make_from_opacus_loader(samples=10, expected_batch_size=3)
    assert given.data_loader.numbers[:2] == (0.3, 3)
    assert "is public" not in given.guarantee


@pytest.mark.parametrize("given", [{"samples": 10}, {"sample_rate": 0.3}])
def test_opacus_own_loader_needs_a_public_batch_size_beside_a_public_rate(given) -> None:
    with pytest.raises(ValueError, match="need expected_batch_size"):
        make_from_opacus_loader(**given)


@pytest.mark.parametrize(("samples", "batch_size"), [(8, 4), (7, 4), (10, 3), (48, 1), (9, 2)])
def test_opacus_numbers_are_those_that_opacus_takes(samples, batch_size) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(samples, 2)), batch_size=batch_size)
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    theirs = sgd(other)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    with pytest.warns(UserWarning, match="Secure RNG"):
        _, theirs, drawn = PrivacyEngine().make_private(
            module=other, optimizer=theirs, data_loader=loader, **options
        )
    numbers = numbers_of_opacus(loader)
    private = make_private(model, sgd(model), loader, check=False, **options, **numbers)

    assert private.optimizer.expected_batch_size == theirs.expected_batch_size
    assert private.data_loader.sample_rate == drawn.sample_rate


def test_steps_without_noise_spend_infinitely_much() -> None:
    private = prepare(8, noise_multiplier=0.0)

    assert private.epsilon_spent() == 0
    release(private)
    assert private.epsilon_spent() == math.inf


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_out_of_its_range_is_refused_when_epsilon_is_asked(delta) -> None:
    private = prepare(8)
    release(private)
    with pytest.raises(ValueError, match="delta must lie between 0 and 1"):
        private.epsilon_spent(delta)


@pytest.mark.parametrize("delta", [0.99, 0.5, 1e-5, 1e-12, 1e-15, 1e-25, 1e-300])
@pytest.mark.parametrize("noise", [0.7, 3.0])
def test_every_delta_has_an_epsilon_that_is_no_less_than_spent(noise, delta) -> None:
    """The Gaussian mechanism's exact delta at that epsilon (Balle and Wang 2018) is smaller."""
    private = prepare(8, noise_multiplier=noise, sample_rate=1.0)
    release(private)
    epsilon = private.epsilon_spent(delta)
    near, far = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise

    assert 0 <= epsilon < math.inf
    assert ndtr(near) - math.exp(epsilon + log_ndtr(far)) <= delta


@pytest.mark.parametrize("noise", [0.05, 1e-3, 1e-9])
def test_next_to_no_noise_spends_more_than_the_signal_tells(noise) -> None:
    """One step in which a sample is surely drawn: epsilon is at least that of the Gaussian."""
    private = prepare(8, noise_multiplier=noise, sample_rate=1.0)
    release(private)
    assert private.epsilon_spent() >= 0.5 / noise**2  # less its square root, and delta's


def test_removed_training_leaves_model_and_optimizer_as_before() -> None:
    x = torch.randn(8, D)
    private = prepare(8)
    inner, model = private.optimizer.original_optimizer, private.model
    release(private)
    iterator = iter(private.data_loader)
    (part,) = next(iterator)
    private.optimizer.backward(model(part)[:, 0])  # its sums are thrown away
    private.remove()
    other = copy.deepcopy(model)
    plain = sgd(other)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
    for one, steps in ((model, inner), (other, plain)):
        one(x).square().mean().backward()
        steps.step()

    assert torch.equal(model.weight, other.weight)
    assert private.spent.steps == 1
    schedule.step()
    assert schedule.get_last_lr() == [0.1]  # a removal within a batch does not hold it up


def test_a_second_private_training_names_what_removes_the_first() -> None:
    private = prepare(8)
    loader = load(8)
    again = sgd(private.model)
    options = PUBLIC | {"noise_multiplier": 1.0}
    with pytest.raises(UnsupportedError, match=r"remove\(\) of that, or of what make_private"):
        make_private(private.model, again, loader, **options)
    private.remove()

    assert release(make_private(private.model, again, loader, **options)).isfinite().all()


def test_removing_twice_leaves_a_later_private_training_alone() -> None:
    first = prepare(8)
    first.remove()
    inner, model = first.optimizer.original_optimizer, first.model
    second = make_private(model, inner, load(8), **PUBLIC, noise_multiplier=1.0)
    first.remove()
    (x,) = next(iter(second.data_loader))
    second.optimizer.backward(model(x)[:, 0])
    with pytest.raises(RuntimeError, match="asked to step on gradients without noise"):
        inner.step()
    second.optimizer.step()

    assert second.spent.steps == 1


def test_a_loop_over_a_removed_training_is_refused() -> None:
    private = prepare(8)
    private.remove()
    with pytest.raises(RuntimeError, match=r"this private training ended, by remove\(\)"):
        next(iter(private.data_loader))


def test_trainings_that_are_counted_together_count_their_own_rates() -> None:
    first = prepare(8, sample_rate=0.5, accountant="rdp")
    second = prepare(8, sample_rate=0.25, accountant="rdp", spent=first.spent)
    for one in (first, second, first):
        release(one)

    assert first.spent.history == second.spent.history == [(8.0, 0.5, 2), (8.0, 0.25, 1)]
    assert first.epsilon_spent() == second.epsilon_spent()
    saved = first.state_dict(exact=True)
    release(second)
    first.load_state_dict(saved)
    assert second.spent.steps == 4  # the last one was released, whatever another training loads


def test_trainings_that_go_on_in_another_process_are_counted_once_each() -> None:
    """In any order: here the second one steps before the first one's state is loaded."""
    first = prepare(8, sample_rate=0.5)
    second = prepare(8, sample_rate=0.5, spent=first.spent)
    for one in (first, first, second):
        release(one)
    saved = [one.state_dict(exact=True) for one in (first, second)]
    again = prepare(8, sample_rate=0.5)
    later = prepare(8, sample_rate=0.5, spent=again.spent)
    third = prepare(8, sample_rate=0.5, spent=again.spent)
    release(third)
    later.load_state_dict(saved[1])
    release(later)
    again.load_state_dict(saved[0])

    for one in (again, later, third):
        assert one.spent.steps == 2 + 2 + 1


def test_rounds_are_counted_together_and_end_with_their_budget(searched_once) -> None:
    budget = {"noise_multiplier": None, "epsilon": 3.0, "steps": 3, "accountant": "rdp"}
    first = prepare(8, **budget)
    release(first)
    second = prepare(8, spent=first.spent, **budget)
    assert second.optimizer.noise_multiplier == first.optimizer.noise_multiplier
    release(second)
    third = prepare(8, spent=second.spent, **budget)
    release(third)

    assert first.spent.steps == 3
    assert 2.95 <= third.epsilon_spent() <= 3.0
    (x,) = next(iter(third.data_loader))
    with pytest.raises(RuntimeError, match="planned for 3 steps, and these are done"):
        third.optimizer.backward(third.model(x)[:, 0])
    with pytest.raises(ValueError, match="3 of 3 steps are done"):
        prepare(8, spent=third.spent, **budget)


EPSILON = {"noise_multiplier": None, "epsilon": 3.0, "steps": 40, "accountant": "rdp"}


def saved_elsewhere(first, second) -> None:
    second.spent.load_state_dict(first.spent.state_dict())


def counted_together(first, second) -> None:
    first.spent.continue_with(second.spent)


@pytest.mark.parametrize("join", [saved_elsewhere, counted_together])
def test_no_step_spends_a_budget_that_others_spent_after_it_was_planned(join) -> None:
    first = prepare(8, noise_multiplier=0.6, accountant="rdp")
    second = prepare(8, **EPSILON)
    release(second)
    release(first)
    join(first, second)
    with pytest.raises(RuntimeError, match="the privacy budget is spent: what was spent has steps"):
        release(second)
    assert second.spent.steps == 2


def test_other_steps_that_fit_into_a_budget_are_no_reason_to_refuse() -> None:
    first = prepare(8, **EPSILON | {"steps": 3})
    less = 0.9 * first.optimizer.noise_multiplier
    second = prepare(8, noise_multiplier=less, sample_rate=0.01, accountant="rdp")
    counted_together(first, second)
    for one in (second, first, first):
        release(one)
    with pytest.raises(RuntimeError, match="planned for 3 steps, and these are done"):
        release(first)
    assert first.epsilon_spent() <= 3.0


@pytest.mark.parametrize("options", [{}, {"bound_quantile": 0.5, "batch_size": 400}])
def test_a_budget_is_spent_as_planned_without_another_word_of_the_accountant(
    monkeypatch, options
) -> None:
    private = prepare(800, **EPSILON | {"steps": 3} | options)
    with monkeypatch.context() as patched:
        patched.setattr(budget, "bound_epsilon", None)
        for _ in range(3):
            release(private)
    assert 2.95 <= private.epsilon_spent() <= 3.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accountant": "prv"}, "has accountant 'rdp', and this training 'prv'"),
        ({"delta": 1e-6}, "has delta 1e-05, and this training 1e-06"),
        ({"noise_multiplier": None, "epsilon": 1.0, "steps": 2}, "steps with less noise than"),
    ],
)
def test_rounds_of_other_terms_are_refused(options, said) -> None:
    first = prepare(8, noise_multiplier=1.0, accountant="rdp")
    release(first)
    with pytest.raises(ValueError, match=said):
        prepare(8, spent=first.spent, **{"accountant": "rdp"} | options)


def test_the_rounds_of_the_page_run_as_they_stand(searched_once) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    clients = {
        name: DataLoader(TensorDataset(torch.randn(20, 3), torch.randint(2, (20,))), batch_size=5)
        for name in ("north", "south")
    }
    names = {"model": model, "clients": clients}
    exec("\n".join(find_all_code("how-to/rounds.md")), names)  # noqa: S102 (the page's code)

    assert not torch.equal(model.weight, before)
    steps = {name: spent.steps for name, spent in names["spent"].items()}
    assert steps == {"north": 12, "south": 12}
    assert all(one.epsilon() <= 3.0 for one in names["spent"].values())
