"""No tensor that a module holds takes samples to ``state_dict()`` or to a later step."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from small_models import EVERY, Around, Composed, each_of, gradients, is_clear, private
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, UnsupportedError

way = each_of(EVERY)

B, T, D = 4, 3, 6


class Keeper(nn.Module):
    """Keeps something of its inputs, in some way, in a tensor of some kind."""

    def __init__(self, keep, kind: str = "buffer", *, size: int = D) -> None:
        super().__init__()
        kept = torch.zeros(size)
        if kind == "attribute":
            self.kept = kept
        elif kind == "parameter":
            self.kept = nn.Parameter(kept, requires_grad=False)
        else:
            self.register_buffer("kept", kept, persistent=kind == "buffer")
        self.other = torch.ones(3)
        self.keep = keep

    def forward(self, x):
        with torch.no_grad():
            self.keep(self, x.detach())
        return x


def mean(x):
    return x.mean((0, 1))


def replace(module, x):
    module.kept = 0.9 * module.kept + mean(x)


def write_through_view(module, x):
    module.kept.numpy()[:] = mean(x).numpy()


def come(module, x):
    module.new = mean(x)


CHANGES = {
    "in place": (lambda module, x: module.kept.add_(mean(x)), "kept was changed in place"),
    "replaced": (replace, "kept was replaced"),
    "through .data": (lambda module, x: module.kept.data.add_(mean(x)), r"kept .* through \.data"),
    "through NumPy": (write_through_view, r"kept was changed through \.data"),
    "with its own values": (lambda module, _: module.kept.mul_(1), "kept was changed in place"),
    "gone": (lambda module, _: vars(module).pop("other", None), "other went"),
    "new": (come, "new came"),
    "exchanged": (lambda module, _: setattr(module, "other", module.kept), "other was replaced"),
}
KINDS = ["buffer", "temporary buffer", "attribute"]


def checkpointed(inner, x):
    return checkpoint(inner, x, use_reentrant=False)


def draw():
    return torch.randn(B, T, D)


def make(inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), inner, nn.Linear(D, D))


def step(clipping, model, x) -> None:
    clipping.backward(model(x).square().sum((1, 2)))


@pytest.mark.parametrize(
    ("kind", "way"),
    [*(("buffer", way) for way in EVERY), *((kind, BookKeeping) for kind in KINDS[1:])],
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_by_forward_is_refused_in_the_same_step(change, kind, way) -> None:
    keep, message = CHANGES[change]
    model = make(Keeper(keep, kind))
    with pytest.raises(RuntimeError, match=rf"1\.{message}"):
        step(way(model, 0.5), model, draw())
    assert is_clear(model)


@pytest.mark.parametrize("size", [D, 5000])
def test_one_element_that_changes_through_data_is_seen(size) -> None:
    def write(module, _):
        module.kept.data[-1] += 1e-6

    model = make(Keeper(write, size=size))
    with pytest.raises(RuntimeError, match=r"1\.kept was changed through \.data"):
        step(BookKeeping(model, 0.5), model, draw())


def holder(held, change) -> nn.Module:
    """Hold things in attributes, and change them."""

    def run(m, x):
        change(m, mean(x.detach()))
        return x

    model = type("Holder", (Composed,), {})(run)
    model.held = held
    return model


def put(held, value) -> None:
    held[0] = value


HELD = {
    "a list": (lambda: [torch.zeros(D)], lambda module, x: put(module.held, x)),
    "a list that grows": (list, lambda module, x: module.held.append(x)),
    "in place in a list": (lambda: [torch.zeros(D)], lambda module, x: module.held[0].add_(x)),
    "a dictionary": (dict, lambda module, x: put(module.held, x)),
    "a tuple": (lambda: (torch.zeros(D),), lambda module, x: setattr(module, "held", (x,))),
    "a set": (set, lambda module, x: module.held.add(x)),
    "a deque": (lambda: deque(maxlen=2), lambda module, x: module.held.append(x)),
    "nested": (lambda: {"a": [(0, [None])]}, lambda module, x: put(module.held["a"][0][1], x)),
    "a simple namespace": (SimpleNamespace, lambda module, x: setattr(module.held, "mean", x)),
    "a number's place": (lambda: 0, lambda module, x: setattr(module, "held", x)),
    "a module in a list": (
        lambda: [nn.BatchNorm1d(D, affine=False)],
        lambda module, x: module.held[0].running_mean.add_(x),
    ),
    "a class": (list, lambda module, x: setattr(type(module), "held_by_all", x)),
    "with the graph": (list, lambda module, x: module.held.append(x.requires_grad_())),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_attributes_hold_stays(kind) -> None:
    build, change = HELD[kind]
    model = make(holder(build(), change))
    message = r"1\.(held|held_by_all|\w+\.running_mean) .* takes what .*compute it anew .*delete it"
    with pytest.raises(RuntimeError, match=message):
        step(BookKeeping(model, 0.5), model, draw())


def test_what_an_attribute_of_a_parameter_holds_stays() -> None:
    def keep(model, x):
        model.linear.weight.mean = mean(x)
        return model.linear(x)

    model = Composed(keep, linear=nn.Linear(D, D))
    with pytest.raises(
        RuntimeError, match=r"linear\.weight\.mean came since this clipping was made"
    ):
        step(BookKeeping(model, 0.5), model, draw())


@pytest.mark.slow  # to import transformers
def test_a_cache_of_keys_stays() -> None:
    cache = pytest.importorskip("transformers").DynamicCache()
    model = make(holder(cache, lambda _, x: cache.update(x[None], x[None], 0)))
    with pytest.raises(RuntimeError, match=r"1\.held came .* takes what"):
        step(BookKeeping(model, 0.5), model, draw())


class Centre(nn.Module):
    """Subtracts the mean of the batch before, wherever it keeps that."""

    def __init__(self, keep) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D), persistent=False)
        self.keep, self.lists = keep, []

    def forward(self, x):
        before = self.lists[-1] if self.lists else self.mean
        self.keep(self, mean(x.detach()))
        return x - before


CARRY = {
    "a temporary buffer": lambda module, mean: module.mean.copy_(mean),
    "another buffer": lambda module, mean: setattr(module, "mean", mean),
    "a list": lambda module, mean: module.lists.append(mean),
}


@pytest.mark.parametrize("way", CARRY)
def test_a_sample_moves_no_later_sum(way) -> None:
    """Step 1 of neighbours, one with a sample of 10,000 more: step 2 is the same, or is not."""
    sums = []
    for extra in (0.0, 1e4):
        torch.manual_seed(0)
        model = nn.Sequential(Centre(CARRY[way]), nn.Linear(D, 1))
        clipping = BookKeeping(model, 1.0)
        first = torch.randn(20, T, D)
        first[0] += extra
        with pytest.raises(RuntimeError, match=r"0\.(mean|lists) .* to later steps without noise"):
            step(clipping, model, first)
        with pytest.raises(RuntimeError, match=r"0\.(mean|lists)"):
            step(clipping, model, torch.randn(20, T, D))
        sums.append(gradients(model))
    assert not any(one.any() for one in sums)


class Passing(nn.Module):
    """Hands a value on within one forward, and counts."""

    def __init__(self, *, deletes: bool) -> None:
        super().__init__()
        self.cache, self.calls, self.deletes = torch.ones(D), 0, deletes
        self.weights = [nn.Parameter(torch.zeros(1), requires_grad=False), "text", None]

    def forward(self, x):
        self.calls += 1
        self.current = x.mean(1)
        y = x + 0 * self.current[:, None] + self.cache
        if self.deletes:
            del self.current
        return y


def test_what_lives_within_one_forward_is_free(way) -> None:
    model = make(Passing(deletes=True))
    clipping = way(model, 0.5)
    for _ in range(3):
        step(clipping, model, draw())
        model.train(not model.training)
    kept = make(Passing(deletes=False))
    clipping = way(kept, 0.5)
    with pytest.raises(RuntimeError, match=r"1\.current came since this clipping was made"):
        step(clipping, kept, draw())
    clipping.remove()
    named = way(kept, 0.5, public_buffers=["1.current"])
    for _ in range(3):
        step(named, kept, draw())


def test_it_is_found_wherever_it_is(way) -> None:
    keeper = Keeper(CHANGES["in place"][0])
    for inner, name in (
        (nn.Sequential(keeper), "1.0.kept"),
        (Around(nn.Sequential(keeper), checkpointed), "1.layer.0.kept"),
        (nn.Sequential(nn.Linear(D, D).requires_grad_(False), keeper), "1.1.kept"),
        (Keeper(CHANGES["in place"][0], "parameter"), "1.kept"),
    ):
        model = make(inner)
        clipping = way(model, 0.5)
        with pytest.raises(RuntimeError, match=f"{name} was changed"):
            step(clipping, model, draw())


def test_it_is_found_in_one_part_of_a_batch(way) -> None:
    def count_once(module, x):
        if len(x) < B:
            module.kept += 1

    model = make(Keeper(count_once))
    clipping = way(model, 0.5)
    optimizer = private(clipping, model, noise_multiplier=1.0)
    optimizer.signal_skip_step()
    step(clipping, model, draw())
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"1\.kept was changed in place"):
        step(clipping, model, torch.randn(B - 1, T, D))


@pytest.mark.parametrize("kind", [*KINDS, "parameter"])
@pytest.mark.parametrize("change", ["in place", "through .data"])
def test_what_its_owner_says_is_public_may_change(change, kind) -> None:
    model = make(Keeper(CHANGES[change][0], kind))
    clipping = BookKeeping(model, 0.5, public_buffers=["1.kept"])
    for _ in range(2):
        step(clipping, model, draw())


def test_what_changes_without_a_step_is_refused_at_the_next(way) -> None:
    model = make(Keeper(lambda *_: None))
    clipping = way(model, 0.5)
    step(clipping, model, draw())
    model.zero_grad()
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="after you load or move a model, make a new clipping"):
        step(clipping, model, draw())
    clipping.remove()
    step(way(model, 0.5), model, draw())


def test_a_name_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"public_buffers: the model has no buffer 'kept'"):
        BookKeeping(make(Keeper(replace)), 0.5, public_buffers=["kept"])


TRAINED = {
    "a tensor": lambda: torch.zeros(D, requires_grad=True),
    "a list of parameters": lambda: [nn.Parameter(torch.zeros(D))],
    "a module in a dictionary": lambda: {"head": nn.Linear(D, D)},
}


@pytest.mark.parametrize("kind", TRAINED)
def test_what_is_trained_beside_the_parameters_is_refused(kind) -> None:
    model = make(holder(TRAINED[kind](), lambda *_: None))
    with pytest.raises(UnsupportedError, match="requires a gradient and is no parameter of the mo"):
        BookKeeping(model, 0.5)


class Extra(nn.Module):
    """Puts something else into ``state_dict()``."""

    def get_extra_state(self):
        return self.last

    def set_extra_state(self, state) -> None:
        self.last = state

    def forward(self, x):
        self.last = float(x.detach().sum())
        return x


def test_extra_state_is_refused_unless_it_is_public() -> None:
    model = make(Extra())
    with pytest.raises(UnsupportedError, match=r"state_dict\(\) holds 1\._extra_state"):
        BookKeeping(model, 0.5)
    clipping = BookKeeping(model, 0.5, public_buffers=["1._extra_state"])
    step(clipping, model, draw())
