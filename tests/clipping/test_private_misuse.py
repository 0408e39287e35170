"""Loops and objects that would not be private, each refused with a sentence."""

import warnings
from typing import Any

import pytest
import torch
from one_call import D, Model, load, prepare, seeded, train
from opacus import GradSampleModule
from small_models import take_step
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from dpprof.private import BookKeeping, UnsupportedError, suggest_max_grad_norm

BUDGET = {"noise_multiplier": None, "epsilon": 5.0, "delta": 1e-3, "accountant": "rdp"}


def model() -> Model:
    return Model().double()


class Stream(IterableDataset[Tensor]):
    """Samples without numbers."""

    def __iter__(self):
        return iter(())


class Mixing(Model):
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return super().losses(x, y).detach().mean() * super().losses(x, y)


class Counting(Model):
    """Divides by a number of the whole batch, as a loss by ``num_items_in_batch`` does."""

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return super().losses(x, y) / (x > 0).sum()


def step(change, **options: Any) -> None:
    """Take a step of a loop in which something is wrong."""
    trained = model()
    private = prepare(trained, **options)
    for batch in private.data_loader:
        change(trained, private.optimizer, batch)
        return


def replace_after_the_optimizer() -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters())
    trained.layers[2] = nn.Linear(7, 1).double()
    prepare(trained, optimizer=optimizer)


def wrap_by_accelerate() -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    trained = model()
    prepare(trained, optimizer=accelerator.prepare(torch.optim.SGD(trained.parameters())))


def let_accelerate_skip_steps() -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    trained = model()
    private = prepare(trained)
    optimizer = accelerator.prepare(private.optimizer)
    with pytest.MonkeyPatch.context() as patch:  # the state is one for the whole process
        patch.setattr(accelerator, "gradient_accumulation_steps", 2)
        patch.setattr(accelerator.gradient_state, "sync_gradients", True)
        for batch in private.data_loader:
            with accelerator.accumulate(trained):
                private.optimizer.backward(trained.losses(*batch))
                optimizer.step()
                optimizer.zero_grad()


def lose_packed_samples() -> None:
    trained = model()

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        outputs = trained.layers(x.view(len(x), -1, D))[:, :, 0]
        return (outputs - y.view(len(y), -1)).square().mean(1)

    private = prepare(trained, check=False, data_loader=load(collate_fn=pack_rows))
    for batch in private.data_loader:
        private.optimizer.backward(losses_of(*batch))


def pack_rows(rows) -> list[Tensor]:
    x, y = zip(*rows, strict=True)
    return [torch.cat(x)[None], torch.stack(y)[None]]


def skip_a_step(loader=None) -> None:
    """Clip the batches of a loader, which is the private one by default, without a step."""
    trained = model()
    private = prepare(trained)
    for batch in loader or private.data_loader:
        private.optimizer.backward(trained.losses(*batch))


def train_twice_on_a_batch(model, optimizer, batch) -> None:
    for _ in range(2):
        take_step(optimizer, model.losses(*batch))


def train_for(steps: int, noise: float = 1.0) -> None:
    """Train by a budget of so many steps, with so much of the noise that it needs."""
    trained = model()
    private = prepare(trained, **BUDGET, steps=steps)
    private.optimizer.noise_multiplier *= noise
    train(private, trained)


def draw_from(of_samples: torch.Generator, of_noise: torch.Generator) -> None:
    prepare(model(), sampling_generator=of_samples, noise_generator=of_noise)


def weigh_samples() -> None:
    sampler = WeightedRandomSampler([1.0] * 24, 24)
    prepare(model(), data_loader=load(shuffle=False, sampler=sampler))


def warn_of_delta() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(model(), delta=0.1)


MISUSES = {
    "a sampler that is not Poisson": (weigh_samples, "a WeightedRandomSampler chooses samples in"),
    "a stream": (
        lambda: prepare(model(), data_loader=DataLoader(Stream(), batch_size=2)),
        "an IterableDataset has none",
    ),
    "drop_last": (
        lambda: prepare(model(), data_loader=load(drop_last=True)),
        "drop_last=True leaves samples out",
    ),
    "a delta above one over the samples": (warn_of_delta, "delta 0.1 is at least 1/24"),
    "an optimizer of a part": (
        lambda: prepare(m := model(), optimizer=torch.optim.SGD(m.layers[0].parameters())),
        r"layers\.2\.weight is trained, and the optimizer does not have it",
    ),
    "an optimizer of other parameters": (
        replace_after_the_optimizer,
        r"a parameter of shape \(1, 7\) that the model does not train; make the optimizer last",
    ),
    "an optimizer in accelerate's": (wrap_by_accelerate, "AcceleratedOptimizer wraps an optimizer"),
    "steps that accelerate skips": (let_accelerate_skip_steps, "the part before had no backward"),
    "packed samples": (lose_packed_samples, "a collator that packs samples joins them"),
    "a mean over the batch": (
        lambda: step(lambda m, optimizer, batch: optimizer.backward(m.losses(*batch).mean())),
        r"losses must be one for each sample, \(B,\), and have shape \(\); compute them with",
    ),
    "a mean over the batch in the check": (
        lambda: prepare(m := model(), losses_of=lambda *batch: m.losses(*batch).mean()),
        r"the step fails: ValueError: losses must be one for each sample, \(B,\)",
    ),
    "losses of 16 bits": (
        lambda: prepare(m := model(), losses_of=lambda *batch: m.losses(*batch).bfloat16()),
        r"torch.bfloat16; compute them of outputs\.float\(\)",
    ),
    "losses that the model has no part in": (
        lambda: prepare(model(), losses_of=lambda x, y: (x[:, 0] - y).square()),
        "compute it of the model's outputs, without no_grad",
    ),
    "losses that take the model": (
        lambda: prepare(model(), losses_of=lambda model, x, y: model.losses(x, y)),
        r"takes \(model, x, y\), and is called with the parts of a batch \(2\)",
    ),
    "no losses": (
        lambda: step(lambda _, optimizer, batch: optimizer.backward(lambda *_: None, *batch)),
        "losses must be of PyTorch's class Tensor, and is NoneType",
    ),
    "a model in Opacus's": (
        lambda: BookKeeping(GradSampleModule(model()), 1.0),
        "GradSampleModule does not work with clipping yet: .*give a model that Opacus",
    ),
    "no model": (lambda: BookKeeping(torch.relu, 1.0), "model must be of PyTorch's class Module"),
    "a data set for a loader": (
        lambda: prepare(model(), data_loader=load().dataset),
        "data_loader must be of PyTorch's class DataLoader, and is TensorDataset",
    ),
    "a class for an optimizer": (
        lambda: prepare(model(), optimizer=torch.optim.SGD),
        "optimizer must be of PyTorch's class Optimizer, and is the class SGD",
    ),
    "a seed for a generator": (
        lambda: prepare(model(), sampling_generator=42),
        "sampling_generator must be of PyTorch's class Generator, and is int",
    ),
    "half a step": (lambda: prepare(model(), **BUDGET, steps=2.5), "steps must be a whole number"),
    "a budget without limit": (
        lambda: prepare(model(), **BUDGET | {"epsilon": float("inf")}, steps=3),
        "epsilon must be positive and finite, and is inf",
    ),
    **{
        f"{name} as a text": (
            lambda name=name: prepare(model(), **BUDGET | {"steps": 3, name: "3"}),
            f"{name} must be a number, and is '3'",
        )
        for name in ("max_grad_norm", "epsilon", "delta", "steps")
    },
    "a count of the batch's tokens": (
        lambda: prepare(Counting().double()),
        "or the loss mixes samples",
    ),
    "backward without a step": (skip_a_step, "the part before had no backward and step"),
    "backward of the clipping": (
        lambda: step(
            lambda m, optimizer, batch: (
                optimizer.clipping.backward(m.losses(*batch)),
                optimizer.step(),
            )
        ),
        r"call backward\(losses\) of this optimizer",
    ),
    "samples of another loader": (
        lambda: skip_a_step(load()),
        "not drawn by the private data",
    ),
    "a batch twice": (lambda: step(train_twice_on_a_batch), "or were clipped before"),
    "less noise than planned": (
        lambda: train_for(4, noise=0.5),
        "planned with a noise multiplier",
    ),
    "noise that follows from samples": (
        lambda: draw_from(seeded(5), seeded(5)),
        "draw the same numbers",
    ),
    "noise of the samples' generator": (
        lambda: draw_from(one := seeded(5), one),
        "draw the same numbers",
    ),
    "a bound from private norms": (
        lambda: suggest_max_grad_norm(m := Model(), m.losses, *next(iter(load()))),
        "norms of private samples are private",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_it_is_refused_with_a_sentence(misuse) -> None:
    attempt, message = MISUSES[misuse]
    with pytest.raises(Exception, match=message) as raised:
        attempt()
    kinds = RuntimeError | ValueError | TypeError | UserWarning | UnsupportedError
    assert isinstance(raised.value, kinds)


def test_whoever_interrupts_the_clipping_is_told_how_to_go_on(monkeypatch) -> None:
    model, optimizer, loader = prepare(Model().double())
    clip = optimizer.clipping.backward

    def interrupt(*given, **named) -> None:
        clip(*given, **named)
        raise KeyboardInterrupt

    batch = next(iter(loader))
    with monkeypatch.context() as patched:
        patched.setattr(optimizer.clipping, "backward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.backward(model.losses, *batch)
    with pytest.raises(RuntimeError, match=r"an interrupt call discard\(\) and iterate again"):
        optimizer.backward(model.losses, *batch)
    optimizer.discard()
    train((model, optimizer, loader), model, epochs=1)
    assert optimizer.steps == len(loader) - 1  # what was interrupted is not drawn again


def test_a_loss_that_mixes_may_be_trusted() -> None:
    prepare(Mixing().double(), check=False)


def test_a_bound_of_public_data_is_their_median_norm() -> None:
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1.0, 0.0], [0.0, 4.0], [3.0, 4.0]])  # and these are the gradients
    found = suggest_max_grad_norm(model, lambda x: model(x)[:, 0], x, data_is_public=True)

    assert found.max_grad_norm == 4
    assert found.quantiles == pytest.approx({0.1: 1.6, 0.25: 2.5, 0.5: 4, 0.75: 4.5, 0.9: 4.8})
    assert model.weight.grad is None
    model(x).sum().backward()  # it is a plain model again
