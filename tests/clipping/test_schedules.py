"""What a loop does once for each batch happens once for each batch, however many parts it has."""

import contextlib
import copy
import functools
import itertools
import math
import pickle
import warnings
from collections.abc import Iterable

import opacus.schedulers
import pytest
import torch
from documents import PRIVATE_TRAINING, find_code
from one_call import BATCH, SAMPLES, Model, load, prepare, scheduled_weights, train, weights
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchMemoryManager
from products import one_in
from small_models import take_step
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from dpprof.private import BookKeeping, NoisyOptimizer

STEPS = 2 * SAMPLES // BATCH
"""Of two epochs."""


class Doubling(lr_scheduler.LRScheduler):
    """A scheduler of a user, which counts by itself in a ``step`` of its own."""

    def __init__(self, optimizer) -> None:
        self.calls = -1
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * 2**self.calls for base in self.base_lrs]

    @functools.wraps(lr_scheduler.LRScheduler.step)
    def step(self, epoch=None) -> None:
        self.calls += 1
        super().step(epoch)


class Halving(lr_scheduler.LRScheduler):
    """A scheduler of a user, whose ``step`` calls no other and leaves ``last_epoch`` alone."""

    def step(self, epoch=None) -> None:  # noqa: ARG002
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


class Counting:
    """A mixin, which is no scheduler itself."""

    def step(self, epoch=None) -> None:
        self.calls = getattr(self, "calls", -1) + 1
        super().step(epoch)


class Mixed(Counting, lr_scheduler.StepLR):
    """A scheduler whose first ``step`` is that of no scheduler."""

    def get_lr(self) -> list[float]:
        return [base * 3.0**-self.calls for base in self.base_lrs]


def one_after_the_other(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


def one_in_another(optimizer):
    first = one_after_the_other(optimizer)
    last = lr_scheduler.ExponentialLR(optimizer, 0.8)
    with warnings.catch_warnings(action="ignore"):  # PyTorch steps the inner one, and warns of it
        return lr_scheduler.SequentialLR(optimizer, [first, last], [5])


def both(optimizer):
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, 1, 4),
        lr_scheduler.ExponentialLR(optimizer, 0.8),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def by_transformers(name: str):
    def make(optimizer):
        transformers = pytest.importorskip("transformers")
        return transformers.get_scheduler(name, optimizer, 2, STEPS)

    return make


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda at: 1 - at / STEPS),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda at: 1 / at),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 1, 0.1, STEPS),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "SequentialLR": one_after_the_other,
    "SequentialLR in SequentialLR": one_in_another,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "ChainedScheduler": both,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 1.0, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, STEPS + 1),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2),
    "SWALR": lambda o: SWALR(o, 0.01, 4),
    "of a user": Doubling,
    "of a user, without a count": Halving,
    "of a mixin": lambda o: Mixed(o, 1),
    "transformers' cosine": by_transformers("cosine"),
    "transformers' greedy": by_transformers("greedy"),
}


def step_once(schedule) -> None:
    """Step as a loop does; a scheduler that watches a loss sees one that does not fall."""
    watches = type(schedule).__name__ in ("ReduceLROnPlateau", "GreedyLR")
    schedule.step(*[1.0] * watches)


def watch(optimizer) -> list[tuple[float, float]]:
    """Note the rate and the momentum of each step that changes the model."""
    seen: list[tuple[float, float]] = []
    optimizer.register_step_pre_hook(
        lambda one, *_: seen.append((one.param_groups[0]["lr"], one.param_groups[0]["momentum"]))
    )
    return seen


def make_sgd(model: Model) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_plainly(name: str):
    """Return what plain training has, one step for each batch, and its scheduler."""
    model = Model()
    optimizer = make_sgd(model)
    seen, schedule = watch(optimizer), SCHEDULERS[name](optimizer)
    for _ in range(STEPS):
        optimizer.step()
        step_once(schedule)
    return seen, schedule


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r".*lr_scheduler|.*optimizer\.step")
        yield


def make_private(max_batch_size: int | None = 2, **options):
    """Return a model, and its private training in parts."""
    model = Model().double()
    return model, prepare(model, max_batch_size=max_batch_size, **options)


def parts_of(private, model: Model, epochs: int = 2) -> Iterable[None]:
    """Train in the documented loop, and do the rest of its body once for each part."""
    _, optimizer, loader = private
    for _ in range(epochs):
        for batch in loader:
            take_step(optimizer, model.losses(*batch))
            yield


def test_every_scheduler_of_pytorch_is_tried() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize(("name", "place"), one_in(3, SCHEDULERS, ["private", "inside", "before"]))
def test_schedulers_step_once_for_each_batch(name, place) -> None:
    model = Model().double()
    sgd = make_sgd(model)
    seen = watch(sgd)
    before = SCHEDULERS[name](sgd) if place == "before" else None
    private = prepare(model, optimizer=sgd, max_batch_size=2, check=False)
    scheduled = private.optimizer if place == "private" else private.optimizer.original_optimizer
    schedule = before or SCHEDULERS[name](scheduled)
    parts = 0
    for _ in parts_of(private, model):
        step_once(schedule)
        parts += 1

    assert parts > 2 * STEPS
    expected, plain = train_plainly(name)
    assert seen == expected
    assert repr(schedule.state_dict()) == repr(plain.state_dict())


def test_batches_without_samples_count() -> None:
    few = load(batch_size=1)  # a third of the batches have no samples
    model, private = make_private(1, data_loader=few, check=False)
    seen = watch(private.optimizer.original_optimizer)
    schedule = lr_scheduler.ExponentialLR(private.optimizer, 0.9)
    for _ in parts_of(private, model, epochs=1):
        schedule.step()
    assert [rate for rate, _ in seen] == pytest.approx([0.1 * 0.9**at for at in range(SAMPLES)])


@pytest.mark.parametrize("order", ["hoisted", "zero_grad first", "scheduler first"])
def test_the_order_of_a_loop_changes_no_number_of_steps(order) -> None:
    model, optimizer, loader = prepare(Model().double(), max_batch_size=2)
    seen = watch(optimizer.original_optimizer)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = schedule.step
    is_wrong = order == "scheduler first"
    said = pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`")
    with said if is_wrong else contextlib.nullcontext():
        for batch in loader:
            if order == "zero_grad first":
                optimizer.zero_grad()
            optimizer.backward(model.losses(*batch))
            if is_wrong:
                schedule.step()
            optimizer.step()
            if order != "zero_grad first":
                optimizer.zero_grad()
            if not is_wrong:
                step()

    assert [rate for rate, _ in seen] == [0.1 * 0.5 ** (at + is_wrong) for at in range(4)]
    assert schedule.last_epoch == 4


@pytest.mark.parametrize("inside", [False, True])
def test_a_step_before_the_first_batch_is_warned_of(inside) -> None:
    _, (_, optimizer, _) = make_private()
    scheduled = optimizer.original_optimizer if inside else optimizer
    schedule = lr_scheduler.ExponentialLR(scheduled, 0.5)
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        schedule.step()


@pytest.mark.parametrize("make", [one_in_another, lambda o: lr_scheduler.StepLR(o, 1)])
def test_a_scheduler_that_is_made_within_a_batch_begins_as_any(make) -> None:
    model, private = make_private(1)
    schedule = None
    for _ in parts_of(private, model, epochs=1):
        if schedule is None:
            assert not private.data_loader.is_last_part
            schedule = make(private.optimizer)
        schedule.step()
    plain = make_sgd(Model())
    expected = make(plain)
    for _ in range(4):
        plain.step()
        expected.step()

    assert schedule.get_last_lr() == expected.get_last_lr()
    assert private.optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_an_older_loop_that_ends_late_changes_nothing() -> None:
    _, (_, _, loader) = make_private(1)
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    older.close()
    assert not loader.is_last_part
    newer.close()
    assert loader.is_last_part


def test_schedulers_step_as_before_once_the_privacy_is_removed_within_a_batch() -> None:
    model = Model().double()
    sgd = make_sgd(model)
    before = lr_scheduler.StepLR(sgd, 1, 0.5)
    private = prepare(model, optimizer=sgd, max_batch_size=1)
    for batch in private.data_loader:
        private.optimizer.backward(model.losses(*batch))
        private.optimizer.step()
        before.step()
        assert not private.data_loader.is_last_part
        private.remove()
        break
    for _ in range(3):
        model.losses(*batch).mean().backward()
        sgd.step()
        before.step()

    assert sgd.param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.parametrize("stop", ["never", "at once", "after a step"])
def test_schedulers_of_epochs_step_after_a_loop_that_was_left_within_a_batch(stop) -> None:
    model, (_, optimizer, loader) = make_private(1)
    schedule = lr_scheduler.StepLR(optimizer, 1, 0.5)
    for epoch in range(3):
        for number, batch in enumerate(loader):
            if epoch > 0 and stop == "at once" and number == 2:
                assert not loader.is_last_part
                break
            take_step(optimizer, model.losses(*batch))
            if epoch > 0 and stop == "after a step":
                assert not loader.is_last_part
                break
        schedule.step()
        assert schedule.get_last_lr() == [0.1 * 0.5 ** (epoch + 1)]


NOISE = {
    "exponential": lambda o: opacus.schedulers.ExponentialNoise(o, gamma=0.9),
    "lambda": lambda o: opacus.schedulers.LambdaNoise(o, noise_lambda=lambda at: 0.9**at),
    "step": lambda o: opacus.schedulers.StepNoise(o, step_size=1, gamma=0.9),
}


@pytest.mark.parametrize("name", NOISE)
def test_the_noise_falls_once_for_each_batch(name) -> None:
    model, private = make_private()
    schedule = NOISE[name](private.optimizer)
    for _ in parts_of(private, model):
        schedule.step()
    found = [noise for noise, _, steps in private.spent.history for _ in range(steps)]
    assert found == pytest.approx([0.9**at for at in range(STEPS)])


def test_the_bound_falls_once_for_each_batch() -> None:
    model, private = make_private()
    schedule = opacus.schedulers.ExponentialGradClip(private.optimizer, gamma=0.9)
    for _ in parts_of(private, model):
        schedule.step()
    assert private.optimizer.max_grad_norm == pytest.approx(0.5 * 0.9**STEPS)


def make_noisy(model: Model) -> NoisyOptimizer:
    clipping, options = BookKeeping(model, 1.0), {"expected_batch_size": BATCH}
    return NoisyOptimizer(make_sgd(model), clipping, noise_multiplier=1.0, **options)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_schedulers_follow_the_batches_of_opacus_batch_memory_manager(workers) -> None:
    """Workers draw parts ahead of the one at hand."""
    model = Model().double()
    optimizer = make_noisy(model)
    seen = watch(optimizer.original_optimizer)
    schedule = SCHEDULERS["OneCycleLR"](optimizer)
    loader = DPDataLoader.from_data_loader(load(num_workers=workers))
    parts = ends = 0
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as split:
        for x, y in itertools.chain(split, split):
            optimizer.clipping.backward(model.losses(x, y) if len(x) else torch.zeros(0))
            is_last = optimizer.is_last_part
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            assert optimizer.is_last_part == is_last
            parts += 1
            ends += is_last

    assert parts > STEPS == ends
    assert seen == train_plainly("OneCycleLR")[0]


def test_a_loop_does_the_rest_of_a_batch_in_its_last_part() -> None:
    """An average of weights, a warm-up by hand and the number of steps, beside batches in whole."""
    model, other = Model().double(), Model().double()
    private, whole = prepare(model, max_batch_size=2), prepare(other)
    average, expected = (
        AveragedModel(one, avg_fn=lambda a, b, _: (a + b) / 2) for one in (model, other)
    )
    numbers = []
    for _ in parts_of(private, model):
        if private.data_loader.is_last_part:
            average.update_parameters(model)
            numbers.append(private.optimizer.steps)
    for _ in parts_of(whole, other):
        assert whole.data_loader.is_last_part
        expected.update_parameters(other)

    assert numbers == list(range(1, STEPS + 1))
    torch.testing.assert_close(weights(average), weights(expected), rtol=1e-9, atol=1e-12)


def test_the_loop_in_the_documents_follows_batches(capsys) -> None:
    model, optimizer, loader = prepare(Model().double(), max_batch_size=2)
    names = {"model": model, "optimizer": optimizer, "data_loader": loader}
    exec(find_code(PRIVATE_TRAINING, "OneCycleLR"), names | {"sample_losses": model.losses})  # noqa: S102
    expected = 1e-3 * (1 + math.cos(math.pi * (10 - 2.6) / (11 - 2.6))) / 2  # falls after 2.6 of 11
    assert capsys.readouterr().out == f"step 10: rate {expected:.2g}\n"


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loader_says_before_backward_which_part_is_the_last(workers) -> None:
    model, private = make_private(data_loader=load(num_workers=workers), check=False)
    _, optimizer, loader = private
    assert loader.is_last_part
    steps = 0
    for batch in loader:
        is_last = loader.is_last_part
        optimizer.backward(model.losses(*batch))
        assert optimizer.is_last_part == is_last
        optimizer.step()
        optimizer.zero_grad()
        steps += is_last
        assert optimizer.steps == steps
        assert loader.is_last_part == is_last
    assert steps == 4


def test_other_optimizers_and_their_schedulers_stay_as_they_are() -> None:
    model, private = make_private(1)
    plain = make_sgd(Model())
    schedule = lr_scheduler.ExponentialLR(plain, 0.9)
    parts = 0
    for _ in parts_of(private, model, epochs=1):
        plain.step()
        schedule.step()
        parts += 1
    assert schedule.last_epoch == parts > 4


def test_ranks_with_other_numbers_of_parts_keep_the_same_rate(pools) -> None:
    (one, rates, parts), (other, other_rates, other_parts) = pools[2].compute(scheduled_weights)

    assert parts != other_parts
    assert rates == other_rates == [0.5**at for at in range(4)]
    assert torch.equal(one, other)


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_optimizer_is_refused_and_breaks_no_other(make_copy) -> None:
    """PyTorch wraps ``step`` of an optimizer's whole class where one is copied."""
    model = Model().double()
    private = prepare(model, max_batch_size=2)
    schedule = lr_scheduler.StepLR(private.optimizer, 1)
    with pytest.raises(TypeError, match=r"a PrivateOptimizer cannot be copied or pickled.*noise"):
        make_copy(private.optimizer)
    if make_copy is not copy.copy:  # which has the same optimizer
        with pytest.raises(TypeError, match=r"use state_dict\(\), of a scheduler too"):
            make_copy(schedule)
    another = Model().double()
    train(prepare(another, max_batch_size=2), another, epochs=1)

    for _ in parts_of(private, model, epochs=1):
        schedule.step()
    assert schedule.last_epoch == 4
