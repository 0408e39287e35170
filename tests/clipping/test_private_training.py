"""``make_private``: an ordinary loop, with Opacus's batches, noise and budget."""

import copy
import io
import os
from functools import partial

import numpy as np
import pytest
import torch
from documents import PRIVATE_TRAINING, find_code
from one_call import BATCH, SAMPLES, D, Model, find_names, load, prepare, seeded, train, weights
from opacus import GradSampleModule
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from small_models import is_clear
from snapshots import assert_sentences, refusals_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from dpprof.private.loop.poisson_batches import PoissonLoader, _Parts
from dpprof.private.noise.noise_keys import make_generator


def sample_by_opacus(generator: torch.Generator):
    """Yield an epoch of Opacus's batches; its data loader draws seeds of workers in between."""
    data = load().dataset
    for chosen in UniformWithReplacementSampler(
        num_samples=SAMPLES, sample_rate=BATCH / SAMPLES, generator=generator
    ):
        yield data[chosen]


def train_by_opacus(model: Model, epochs: int = 2) -> None:
    wrapped, generator = GradSampleModule(model.layers), make_generator(seeded(2))
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        expected_batch_size=BATCH,
        generator=seeded(3),
    )
    for _ in range(epochs):
        for x, y in sample_by_opacus(generator):
            optimizer.zero_grad()
            (wrapped(x)[:, 0] - y).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("method", ["auto", "flash"])
@pytest.mark.parametrize("max_batch_size", [None, 2])
def test_the_same_seeds_train_what_opacus_trains(method, max_batch_size) -> None:
    model, other = Model().double(), Model().double()
    private = prepare(model, method=method, max_batch_size=max_batch_size)
    parts = train(private, model)
    train_by_opacus(other)

    assert private.optimizer.steps == 8
    assert (parts > 8) == (max_batch_size is not None)
    # Opacus adds 1e-6 to each norm before it divides by it.
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-6, atol=1e-6)


def test_a_budget_that_no_noise_keeps_is_refused_in_its_own_terms() -> None:
    budget = {"noise_multiplier": None, "epsilon": 1e-4, "delta": 1e-9, "steps": 8}
    told = r"keeps epsilon 0\.0001 at delta 1e-09 for 8 steps that dr"
    with pytest.raises(ValueError, match=told):
        prepare(Model().double(), **budget, accountant="rdp")


BUDGET = {"noise_multiplier": None, "epsilon": 5.0, "delta": 1e-3, "steps": 3}


def test_no_step_follows_the_last_one_that_was_planned() -> None:
    model = Model().double()
    private = prepare(model, **BUDGET, accountant="rdp")
    with pytest.raises(RuntimeError, match="planned for 3 steps, and these are done"):
        train(private, model)
    assert private.optimizer.steps == 3
    assert 0 < private.epsilon_spent() < 5.0


def test_what_was_spent_counts_every_noise() -> None:
    model = Model().double()
    private = prepare(model, delta=1e-3, accountant="rdp")
    assert private.epsilon_spent() == 0
    train(private, model, epochs=1)
    private.optimizer.noise_multiplier = 2.0
    train(private, model, epochs=1)

    assert private.spent.history == [(1.0, 0.25, 4), (2.0, 0.25, 4)]
    assert private.epsilon_spent(1e-2) < private.epsilon_spent()


@pytest.mark.parametrize("max_batch_size", [None, 2])
def test_batches_without_samples_take_a_step_of_noise(max_batch_size) -> None:
    model = Model().double()
    few = load(batch_size=1)  # a third of the batches have no samples
    private = prepare(model, data_loader=few, check=False, max_batch_size=max_batch_size)
    _, optimizer, loader = private
    empty = 0
    for batch in loader:
        before = weights(model)
        optimizer.backward(model.losses(*batch))
        is_empty = optimizer.clipping.sample_norms.numel() == 0
        optimizer.step()
        optimizer.zero_grad()
        empty += is_empty
        assert not is_empty or not torch.equal(weights(model), before)

    assert len(loader) == SAMPLES
    assert empty > 3
    assert optimizer.steps == SAMPLES


def test_samples_are_drawn_independently_and_with_the_rate() -> None:
    model = Model().double()
    _, _, loader = prepare(model, sampling_generator=None)
    counts = []
    for _ in range(250):
        counts += [len(batch[0]) for batch in _discarding(loader)]
    mean, variance = torch.tensor(counts).double().mean(), torch.tensor(counts).double().var()

    assert len(counts) == 1000
    assert abs(mean - BATCH) < 0.45  # 6.7 deviations
    assert abs(variance - SAMPLES * 0.25 * 0.75) < 1.4


def _discarding(loader: PoissonLoader):
    for batch in loader:
        yield batch
        loader.optimizer.discard()


def test_steps_that_are_taken_again_in_a_process_count_again() -> None:
    """With another rate, or other samples, they release something else, whose noise is fresh."""
    model = Model().double()
    private = prepare(model)
    train(private, model, epochs=1)
    saved = copy.deepcopy(private.state_dict(exact=True))
    privacy = saved["optimizer"]["privacy"] | {"secrets": saved["secrets"]["noise"]}
    alone = saved["optimizer"] | {"privacy": privacy}
    before = weights(model)
    train(private, model, epochs=1)
    released = weights(model)
    private.load_state_dict(saved, exact=True)
    assert torch.equal(weights(model), before)
    assert private.spent.steps == 8
    private.optimizer.param_groups[0]["lr"] = 0.05
    train(private, model, epochs=1)
    assert not torch.equal(weights(model), released)
    assert private.spent.steps == 12
    private.optimizer.load_state_dict(alone, exact=True)
    train(private, model, epochs=1)
    assert private.spent.steps == 16


def test_steps_of_two_runs_from_one_state_all_count() -> None:
    models = [Model().double() for _ in range(2)]
    first, second = (prepare(model, folds=2) for model in models)
    train(first, models[0], epochs=1)
    second.load_state_dict(first.state_dict(exact=True))
    for private, model in zip((first, second), models, strict=True):
        train(private, model, epochs=1)
    first.load_state_dict(second.state_dict(exact=True))
    assert first.spent.steps == 12
    assert first.spent.history == [(1.0, 0.5, 6)]  # of each of two folds


def test_steps_of_a_fork_count_beside_those_of_the_other(monkeypatch) -> None:
    private = prepare(Model().double())
    spent = private.spent
    spent.count(private.optimizer)
    fork = copy.deepcopy(spent)
    spent.count(private.optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 0)
        fork.count(private.optimizer)
    spent.load_state_dict(fork.state_dict())
    assert spent.history == [(1.0, 0.25, 3)]


def test_a_batch_that_was_left_is_thrown_away() -> None:
    model = Model().double()
    private = prepare(model, max_batch_size=1)
    _, optimizer, loader = private
    for batch in loader:
        optimizer.backward(model.losses(*batch))
        optimizer.step()
        break
    before = weights(model)
    assert optimizer.steps == 0
    next(iter(loader))

    assert torch.equal(weights(model), before)
    assert is_clear(model)


def test_workers_load_ahead_and_parts_stay_in_order() -> None:
    models = [Model().double() for _ in range(2)]
    for model, workers in zip(models, (0, 2), strict=True):
        loader = load(num_workers=workers)
        train(prepare(model, data_loader=loader, max_batch_size=2), model, epochs=1)

    assert torch.equal(*map(weights, models))


def make_replacing() -> DataLoader:
    data = load().dataset
    return load(shuffle=False, sampler=RandomSampler(data, replacement=True))


def refuse_settings(options) -> str:
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = refusals_of(partial(prepare, model))({"optimizer": optimizer} | options)

    model.losses(torch.ones(2, D).double(), torch.ones(2).double()).sum().backward()
    optimizer.step()  # nothing was left behind: not on the optimizer
    prepare(model)  # and not on the model
    return said


def test_settings_that_make_the_guarantee_false_are_refused() -> None:
    assert_sentences("clipping/settings", refuse_settings)


LOADERS = {
    "with replacement is not Poisson sampling": make_replacing,
    "the sampler knows 6 samples, and the dataset has 24": lambda: load(
        shuffle=False, sampler=SequentialSampler(range(6))
    ),
    "=None makes no batches": lambda: load(batch_size=None),
}


@pytest.mark.parametrize("told", LOADERS)
def test_loaders_whose_samples_are_not_independent_are_refused(told) -> None:
    assert told in refuse_settings({"data_loader": LOADERS[told]()})


def test_a_part_without_a_step_is_refused() -> None:
    """Otherwise the parts of two batches would meet in one step."""
    model, optimizer, loader = prepare(Model().double(), max_batch_size=2)
    for has_backward in (False, True):
        parts = iter(loader)
        part = next(parts)
        if has_backward:
            optimizer.backward(model.losses(*part))
        with pytest.raises(RuntimeError, match="the part before had no backward and step"):
            next(parts)
    train((model, optimizer, loader), model, epochs=1)


@pytest.mark.parametrize("part", ["optimizer", "data_loader", None])
def test_a_state_has_secrets_only_where_they_are_asked_for(part) -> None:
    """Frameworks write what ``state_dict()`` returns into checkpoints by themselves."""
    private = prepare(Model().double(), bound_quantile=0.5, noise_multiplier=0.5)
    whole = private if part is None else getattr(private, part)
    assert "secrets" in find_names(whole.state_dict(exact=True))
    state = whole.state_dict()
    assert "secrets" not in find_names(state)
    with pytest.raises(ValueError, match=r"save state_dict\(exact=True\)"):
        whole.load_state_dict(state, exact=True)
    whole.load_state_dict(state)


def test_an_older_iteration_takes_no_part_of_a_newer_one() -> None:
    """Else what is told of parts, such as which is the last, would be told of others."""
    _, optimizer, loader = prepare(Model().double(), max_batch_size=2)
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    with pytest.raises(RuntimeError, match="another iteration over this data loader began"):
        next(older)
    optimizer.discard()
    for x, _ in newer:
        assert optimizer._part.size == len(x)
        optimizer.discard()
    assert not loader._parts.drawn


def test_a_state_loaded_within_the_loop_ends_the_iteration() -> None:
    model = Model().double()
    private = prepare(model)
    saved = copy.deepcopy(private.state_dict(exact=True))
    parts = iter(private.data_loader)
    private.optimizer.backward(model.losses(*next(parts)))
    private.optimizer.step()
    private.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="or a state was loaded"):
        next(parts)


def test_hooks_do_not_stop_the_counting() -> None:
    model = Model().double()
    private = prepare(model, delta=1e-3, accountant="rdp")
    private.optimizer.attach_step_hook(lambda _: None)
    train(private, model, epochs=1)

    assert private.spent.history == [(1.0, 0.25, 4)]


@pytest.mark.parametrize("sampling", [{"truncated_batch_size": 3}, {"folds": 2}])
def test_accountants_that_would_count_too_little_get_no_hook(sampling) -> None:
    private = prepare(Model().double(), **sampling)
    with pytest.raises(ValueError, match=r"ask epsilon_spent\(\) of make_private"):
        private.optimizer.attach_step_hook(lambda _: None)


def test_a_state_that_is_refused_changes_no_weights() -> None:
    model = Model().double()
    private = prepare(model)
    saved = copy.deepcopy(private.state_dict())
    train(private, model, epochs=1)
    before = weights(model)
    other = prepare(Model().double(), max_grad_norm=0.25).state_dict()
    with pytest.raises(ValueError, match=r"max_grad_norm 0\.25, and this one with 0\.5"):
        private.load_state_dict(other)
    for batch in private.data_loader:
        private.optimizer.backward(model.losses(*batch))
        break
    with pytest.raises(RuntimeError, match="a state cannot be loaded within a batch"):
        private.load_state_dict(saved)
    assert torch.equal(weights(model), before)


def test_an_iteration_that_begins_within_a_batch_is_told(caplog) -> None:
    model = Model().double()
    private = prepare(model, max_batch_size=1, sample_rate=0.9)
    private.optimizer.backward(model.losses(*next(iter(private.data_loader))))
    private.optimizer.step()
    next(iter(private.data_loader))
    assert "begins within a batch, whose parts are thrown away" in caplog.text


def test_names_in_place_of_parts_are_told() -> None:
    model = Model().double()
    private = prepare(model)
    next(iter(private.data_loader))
    with pytest.raises(TypeError, match=r"backward\(losses_of, \*\*batch\)"):
        private.optimizer.backward(model.losses, *{"x": 1, "y": 2})


def test_samples_are_never_drawn_more_often_than_the_rate_says() -> None:
    for rate in (1 / 3, 0.1, 2.0**-13 / 3, 1e-6):
        parts = _Parts([range(1)], rate, None, seeded(0))
        bits = 24 if rate > 2.0**-12 else 53
        assert rate * (1 - 2.0**-11) < parts._threshold <= rate
        assert parts._threshold * 2**bits == int(parts._threshold * 2**bits)


def test_a_state_of_other_data_is_refused() -> None:
    saved = prepare(Model().double()).data_loader.state_dict(exact=True)
    fewer = TensorDataset(*load().dataset[:12])
    private = prepare(Model().double(), data_loader=DataLoader(fewer, batch_size=6, shuffle=True))
    with pytest.raises(ValueError, match="saved with steps in an epoch: 4, and here"):
        private.data_loader.load_state_dict(saved, exact=True)


def test_a_state_of_other_settings_is_refused() -> None:
    state = prepare(Model().double()).state_dict()
    with pytest.raises(ValueError, match=r"made with noise_multiplier 1\.0, and this"):
        prepare(Model().double(), noise_multiplier=2.0).load_state_dict(state)


def test_opacus_own_loader_keeps_its_rate() -> None:
    model = Model().double()
    loader = DPDataLoader.from_data_loader(load())
    private = prepare(model, data_loader=loader, check=False)

    assert private.data_loader.sample_rate == 0.25
    assert private.optimizer.expected_batch_size == BATCH


@pytest.mark.parametrize("page", ["../README.md", PRIVATE_TRAINING])
def test_the_loop_in_the_documents_trains(page) -> None:
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    tokens = torch.randint(11, (40, 6))
    data = TensorDataset(tokens, tokens.roll(1, 1))
    before = weights(model)

    def sample_losses(tokens: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(model(tokens).mT, labels, reduction="none").mean(1)

    names = {"model": model, "sample_losses": sample_losses}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    names["data_loader"] = DataLoader(data, batch_size=10, shuffle=True)
    exec(find_code(page, "make_private"), names)  # noqa: S102

    assert names["private"].optimizer.steps == 12
    assert not torch.equal(weights(model), before)


def test_a_state_that_accelerate_saves_resumes_without_secrets(tmp_path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = Model().double()
    private = prepare(accelerator.prepare_model(model))
    accelerator.register_for_checkpointing(private)
    accelerator.prepare(private.optimizer)  # which is not asked for
    train(private, model, 1)
    accelerator.save_state(tmp_path)
    files = [*tmp_path.glob("optimizer*"), *tmp_path.glob("custom*")]
    states = [torch.load(path, weights_only=False) for path in files]
    assert len(states) == 2
    assert "spent" in find_names(states)
    assert "secrets" not in find_names(states)

    again = prepare(Model().double())
    again.load_state_dict(states[1])
    assert again.spent.steps == private.spent.steps == 4


OF_USERS = {"unit": "user", "users": [at // 2 for at in range(SAMPLES)], "check": False}
IN_BANDS = {"noise_generator": None, "steps": 8, "check": False}


@pytest.mark.parametrize(
    "options",
    [
        OF_USERS | {"samples_of_user": 2, "max_batch_size": 4},
        IN_BANDS | {"noise": "banded", "bands": 2, "folds": 2},
        IN_BANDS | {"noise": "bisr", "bands": 2, "folds": 2},
        {"verify_every": 3},
        {"truncated_batch_size": 12},
        {"max_batch_size": 6},
    ],
)
def test_numbers_may_be_those_of_numpy_and_a_state_has_none_of_them(options) -> None:
    """``torch.load`` with ``weights_only`` refuses them."""
    is_count = {name: type(value) is int for name, value in options.items()}
    options = {n: np.int64(value) if is_count[n] else value for n, value in options.items()}
    model = Model().double()
    private = prepare(model, **options)
    train(private, model, epochs=1)
    file = io.BytesIO()
    torch.save(private.state_dict(exact=True), file)
    file.seek(0)
    private.load_state_dict(torch.load(file, weights_only=True), exact=True)


@pytest.mark.parametrize("name", ["verify_every", "max_batch_size", "samples_of_user", "bands"])
def test_a_truth_value_is_no_number(name) -> None:
    options = (OF_USERS if name == "samples_of_user" else {}) | {name: True}
    options |= {"noise": "banded", "steps": 8} if name == "bands" else {}
    with pytest.raises(ValueError, match="a whole number"):
        prepare(Model().double(), **options)
