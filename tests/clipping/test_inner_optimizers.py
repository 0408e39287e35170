"""Noise goes inside of optimizers whose whole step is step(), also with small states."""

import copy
import io

import pytest
import torch
from small_models import one_by_one, private, squares, take_step
from torch import nn
from torch.optim import SGD, Optimizer

from dpprof.private import BookKeeping, NoisyOptimizer
from dpprof.private.noise.inner_optimizers import refuse_optimizer


class Lookahead:
    """Moves slow weights towards those of an optimizer, every other step."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.steps = base, 0
        self.parameters = [p for group in base.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.base.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, p in zip(self.slow, self.parameters, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Wrapper(SGD):
    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, lr=1.0)
        self.base = base


class SAM(SGD):
    """Climbs before it descends."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Asserting(SGD):
    def step(self, closure=None):
        assert closure is not None, "this needs a closure"
        return super().step(closure)


class Raising(SGD):
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("this needs a closure")
        return super().step(closure)


class Sophia(SGD):
    def update_hessian(self) -> None: ...


class Curvature(SGD):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1.0)
        self.layers = [model]


class Uninitialised(Optimizer):
    def __init__(self, base: Optimizer) -> None:
        self.param_groups = base.param_groups


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=1.0)


REFUSED = {
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters()), r"computes losses .*closure"),
    "an assertion": (lambda model: Asserting(model.parameters(), lr=1.0), r"Asserting computes"),
    "an exception": (lambda model: Raising(model.parameters(), lr=1.0), r"Raising computes"),
    "two steps": (lambda model: SAM(model.parameters(), lr=1.0), "SAM takes two steps"),
    "curvature": (lambda model: Sophia(model.parameters(), lr=1.0), "reads second derivatives"),
    "a model": (Curvature, r"holds a model \(layers\)"),
    "a wrapper": (lambda model: Wrapper(sgd(model)), r"Wrapper wraps an optimizer \(base\)"),
    "a private one": (
        lambda model: private(BookKeeping(model, 1.0), model),
        r"NoisyOptimizer wraps an optimizer \(original_optimizer\)",
    ),
    "not initialised": (lambda model: Uninitialised(sgd(model)), "did not call Optimizer.__init__"),
    "no optimizer": (lambda model: [sgd(model)], "list is not a torch.optim.Optimizer"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_by_name(kind) -> None:
    make, sentence = REFUSED[kind]
    with pytest.raises(ValueError, match=sentence):
        refuse_optimizer(make(nn.Linear(2, 2)))


OTHERS = [
    name
    for name, one in vars(torch.optim).items()
    if isinstance(one, type) and issubclass(one, Optimizer) and name not in ("Optimizer", "LBFGS")
]


@pytest.mark.parametrize("name", OTHERS)
def test_those_of_pytorch_are_taken_but_for_lbfgs(name) -> None:
    refuse_optimizer(getattr(torch.optim, name)([nn.Parameter(torch.zeros(2, 2))]))


def test_one_that_had_noise_before_is_taken() -> None:
    model = nn.Linear(2, 2)
    optimizer = private(BookKeeping(model, 1.0), model)
    refuse_optimizer(optimizer.original_optimizer)


def test_a_wrapper_around_processes_what_has_noise() -> None:
    """Slow weights after two steps lie between those of before and of after."""
    expected, model = (nn.Linear(2, 1, bias=False) for _ in range(2))
    model.load_state_dict(expected.state_dict())
    found = []
    for one in (expected, model):
        clipping = BookKeeping(one, 1.0)
        noisy = private(clipping, one)
        optimizer = Lookahead(noisy) if one is model else noisy
        before = one.weight.detach().clone()
        for _ in range(2):
            clipping.backward(squares(one, torch.ones(2, 2)))
            optimizer.step()
            noisy.zero_grad()
        found.append((before, one.weight.detach()))
    (before, plain), (_, slow) = found
    torch.testing.assert_close(slow, before.lerp(plain, 0.5))


def make_adamw_8bit(*parameters, **options):
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(*parameters, **options)


OPTIMIZERS = [make_adamw_8bit, torch.optim.Adafactor]
BATCH, BOUND = 4, 0.5


class Run:
    """A private training of a matrix that is large enough for 8 bits, and of a vector."""

    def __init__(self, make, noise_multiplier: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(64, 128)
        self.x = torch.randn(BATCH, 64)
        self.clipping = BookKeeping(self.model, BOUND)
        self.optimizer = NoisyOptimizer(
            make(self.model.parameters(), lr=0.01),
            self.clipping,
            noise_multiplier=noise_multiplier,
            expected_batch_size=BATCH,
            generator=torch.Generator().manual_seed(1),
        )

    def step(self, count: int = 1) -> "Run":
        for _ in range(count):
            take_step(self.optimizer, self.losses(self.x))
        return self

    def losses(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().sum(1)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_applies_the_clipped_mean_as_the_optimizer_alone_would(make) -> None:
    run = Run(make)
    plain = copy.deepcopy(run.model)
    optimizer = make(plain.parameters(), lr=0.01)
    for _ in range(2):
        _, total, _ = one_by_one(lambda x: plain(x).square().sum(1), plain, (run.x,), BOUND)
        parts = total.float().split([p.numel() for p in plain.parameters()])
        for parameter, part in zip(plain.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter) / BATCH
        optimizer.step()
        optimizer.zero_grad()
        run.step()

    for ours, theirs in zip(run.model.parameters(), plain.parameters(), strict=True):
        # Rounding of a gradient may move a moment to the next of its 256 values.
        assert (ours - theirs).abs().max() <= 2e-4


def test_moments_of_large_matrices_take_8_bits_and_small_ones_32() -> None:
    run = Run(OPTIMIZERS[0]).step()
    weight, bias = (run.optimizer.state[p] for p in run.model.parameters())

    assert weight["state1"].dtype is weight["state2"].dtype is torch.uint8
    assert bias["state1"].dtype is torch.float32


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_without_noise_is_refused(make) -> None:
    run = Run(make)
    run.clipping.backward(run.losses(run.x))

    with pytest.raises(RuntimeError, match="was asked to step on gradients without noise"):
        run.optimizer.original_optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_run_that_is_resumed_ends_with_the_same_bits(make) -> None:
    whole, stopped, resumed = (Run(make, noise_multiplier=1.0) for _ in range(3))
    whole.step(4)
    stopped.step(2)
    file = io.BytesIO()
    torch.save([stopped.model.state_dict(), stopped.optimizer.state_dict(exact=True)], file)
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer, exact=True)
    resumed.step(2)

    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
