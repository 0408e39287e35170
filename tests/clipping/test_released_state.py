"""What leaves a run in ``state_dict()`` beside trained parameters changes by no step."""

import pytest
import torch
from small_models import EVERY, is_clear, private
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpprof.clipping.book_keeping import BookKeeping
from dpprof.spec.registry import UnsupportedError

B, T, D = 4, 3, 6


class Keeper(nn.Module):
    """Keeps something of its inputs, in some way."""

    def __init__(self, keep, *, persistent: bool = True, name: str = "kept") -> None:
        super().__init__()
        self.register_buffer(name, torch.zeros(D), persistent=persistent)
        self.keep = keep

    def forward(self, x):
        with torch.no_grad():
            self.keep(self, x.detach())
        return x


class Parameter(nn.Module):
    """A codebook, as a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.zeros(D), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.kept.lerp_(x.mean((0, 1)), 0.1)
        return x


def add(module, x):
    module.kept += x.mean((0, 1))


def replace(module, x):
    module.kept = 0.9 * module.kept + x.mean((0, 1))


def write_through_data(module, x):
    module.kept.data.lerp_(x.mean((0, 1)), 0.1)


def count_once(module, x):
    if len(x) < B:
        module.kept += 1


CHANGES = {
    "in place": (add, r"1\.kept was changed in place"),
    "replaced": (replace, r"1\.kept was replaced"),
    "through .data": (write_through_data, r"1\.kept was changed through \.data"),
    "with its own values": (lambda keeper, _: keeper.kept.mul_(1), r"1\.kept was changed in place"),
    "gone": (lambda keeper, _: keeper._buffers.pop("kept", None), r"1\.kept went"),
    "new": (lambda keeper, x: keeper.register_buffer("other", x.mean((0, 1))), r"1\.other came"),
}


class Wrapped(nn.Sequential):
    """A body under checkpointing."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def make(inner: nn.Module, *, nested: bool = False) -> nn.Module:
    body = nn.Sequential(inner) if nested else inner
    return nn.Sequential(nn.Linear(D, D), body, nn.Linear(D, D))


def step(clipping, model, x) -> None:
    clipping.backward(model(x).square().sum((1, 2)))


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_by_forward_is_refused_in_the_same_step(change, way) -> None:
    keep, message = CHANGES[change]
    model = make(Keeper(keep))
    clipping = way(model, 0.5)
    with pytest.raises(RuntimeError, match=message):
        step(clipping, model, torch.randn(B, T, D))
    assert is_clear(model)


@pytest.mark.parametrize("way", EVERY)
def test_it_is_found_wherever_it_is(way) -> None:
    nested = make(Keeper(add), nested=True)
    checkpointed = make(Wrapped(Keeper(add)))
    frozen = make(nn.Sequential(nn.Linear(D, D).requires_grad_(False), Keeper(add)))
    parameter = make(Parameter())
    for model, name in (
        (nested, "1.0.kept"),
        (checkpointed, "1.0.kept"),
        (frozen, "1.1.kept"),
        (parameter, "1.kept"),
    ):
        clipping = way(model, 0.5)
        with pytest.raises(RuntimeError, match=f"{name} was changed in place since this clipping"):
            step(clipping, model, torch.randn(B, T, D))


@pytest.mark.parametrize("way", EVERY)
def test_it_is_found_in_one_part_of_a_batch(way) -> None:
    model = make(Keeper(count_once))
    clipping = way(model, 0.5)
    optimizer = private(clipping, model, noise_multiplier=1.0)
    optimizer.signal_skip_step()
    step(clipping, model, torch.randn(B, T, D))
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"1\.kept was changed in place"):
        step(clipping, model, torch.randn(B - 1, T, D))


@pytest.mark.parametrize("way", EVERY)
def test_what_its_owner_says_is_public_may_change(way) -> None:
    for inner in (Keeper(add), Keeper(write_through_data), Keeper(replace), Parameter()):
        model = make(inner)
        clipping = way(model, 0.5, public_buffers=["1.kept"])
        for _ in range(2):
            step(clipping, model, torch.randn(B, T, D))
        clipping.remove()


@pytest.mark.parametrize("way", EVERY)
def test_a_buffer_that_no_checkpoint_holds_may_change(way) -> None:
    model = make(Keeper(add, persistent=False))
    clipping = way(model, 0.5)
    for _ in range(2):
        step(clipping, model, torch.randn(B, T, D))
    assert "1.kept" not in model.state_dict()


@pytest.mark.parametrize("way", EVERY)
def test_what_changes_without_a_step_is_refused_at_the_next(way) -> None:
    model = make(Keeper(lambda *_: None))
    clipping = way(model, 0.5)
    step(clipping, model, torch.randn(B, T, D))
    model.zero_grad()
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="after you load or move a model, make a new clipping"):
        step(clipping, model, torch.randn(B, T, D))
    clipping.remove()
    step(way(model, 0.5), model, torch.randn(B, T, D))


def test_a_name_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"public_buffers: the model has no buffer 'kept'"):
        BookKeeping(make(Keeper(add)), 0.5, public_buffers=["kept"])


class Extra(nn.Module):
    """Puts something else into ``state_dict()``."""

    def get_extra_state(self):
        return self.last

    def set_extra_state(self, state) -> None:
        self.last = state

    def forward(self, x):
        self.last = float(x.sum())
        return x


def test_extra_state_is_refused_unless_it_is_public() -> None:
    model = make(Extra())
    with pytest.raises(UnsupportedError, match=r"state_dict\(\) holds 1\._extra_state"):
        BookKeeping(model, 0.5)
    clipping = BookKeeping(model, 0.5, public_buffers=["1._extra_state"])
    step(clipping, model, torch.randn(B, T, D))
