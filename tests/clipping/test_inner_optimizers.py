"""Noise goes inside of optimizers whose whole step is ``step()``; others are refused by name."""

import pytest
import torch
from small_models import private, squares
from torch import nn
from torch.optim import SGD, Optimizer

from dpprof.private.engine.book_keeping import BookKeeping
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
