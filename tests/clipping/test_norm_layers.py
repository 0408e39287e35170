"""RMS norms are recognised by what they compute; frozen batch norms mix nothing."""

import copy

import pytest
import torch
from small_models import assert_exact
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpprof.predict.memory.recorder import Recorder
from dpprof.private import BookKeeping, PerLayerClipping, UnsupportedError
from dpprof.private.layers.layers_without_rule import run_any_layer
from dpprof.private.layers.normalisations import recognise
from dpprof.private.layers.rules import find_rule

D = 6


def normalise(x, eps: float):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Norm(nn.Module):
    """The parameter and the epsilon of an RMS norm."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(D)), eps


class Llama(Norm):
    def forward(self, hidden_states):
        x = normalise(hidden_states.to(torch.float32), self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class Olmo(Norm):
    def forward(self, hidden_states):
        x = normalise(hidden_states.to(torch.float32), self.variance_epsilon)
        return (self.weight * x).to(hidden_states.dtype)


class Gemma(Norm):
    def forward(self, x):
        y = normalise(x.float(), self.variance_epsilon)
        return (y * (1.0 + self.weight.float())).type_as(x)


class OfFloat64(Norm):
    """It casts nothing, so float64 stays float64."""

    def forward(self, x):
        return normalise(x, self.variance_epsilon) * self.weight


class Fixed(Norm):
    """Its epsilon is not the attribute."""

    def forward(self, x):
        return self.weight * normalise(x, 1e-3)


class Centred(Llama):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class MixesSamples(Llama):
    def forward(self, x):
        return super().forward(x - x.mean(0, keepdim=True))


class Gated(Llama):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class Dropping(Llama):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Fails(Llama):
    def forward(self, x):
        raise RuntimeError(f"{x.shape} is not what it wants")


class Buffered(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(D))


KNOWN = {Llama: (False, True), Olmo: (False, False), Gemma: (True, False)}
OTHERS = [OfFloat64, Fixed, Centred, MixesSamples, Gated, Dropping, Fails, Buffered]


@pytest.mark.parametrize("kind", KNOWN)
def test_a_norm_is_recognised_with_its_order_of_casts(kind) -> None:
    assert recognise(kind(1e-5)) == ("weight", "variance_epsilon", *KNOWN[kind])


@pytest.mark.parametrize("kind", OTHERS)
def test_anything_else_stays_with_torch_func(kind) -> None:
    assert find_rule(kind().eval()) == (run_any_layer, kind)  # in eval() dropout is off


def test_the_probe_leaves_no_trace() -> None:
    class Counts(Llama):
        calls = 0

        def forward(self, x):
            self.calls += 1
            torch.rand(1)
            return super().forward(x)

    layer = Counts()
    layer.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    before, weight = torch.get_rng_state(), layer.weight.clone()
    recorder = Recorder(is_there=lambda tensor, _: not tensor.is_meta)
    with recorder, torch.autocast("cpu", torch.bfloat16):
        events = len(recorder.events)
        assert recognise(layer) is not None

    assert len(recorder.events) == events
    assert layer.calls == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(layer.weight, weight)


def test_a_norm_of_fake_tensors_is_recognised() -> None:
    with FakeTensorMode():
        layer = Gemma()
        clipping = BookKeeping(layer, 1.0)
        clipping.backward(layer(torch.randn(3, 4, D)).sum((1, 2)))

        assert recognise(Gemma(2e-6)) is not None
        assert layer.weight.grad.shape == (D,)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_input", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_dtypes_are_those_of_the_layer_itself(kind, of_input, of_weight) -> None:
    layer = kind().to(of_weight)
    x = torch.randn(2, 3, 4, D).to(of_input).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        BookKeeping(layer, 1.0)
        layer.requires_grad_(False)
        found = layer(hidden_states=x) if kind is not Gemma else layer(x)

    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(expected.float().square().sum(), x)
    (own,) = torch.autograd.grad(found.float().square().sum(), x)
    tolerance = 1e-5 if gradient.dtype == of_weight == torch.float32 else 0.05
    torch.testing.assert_close(own, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("shape", [(3, D), (3, 5, D), (3, 2, 5, D)])
def test_norms_of_samples_are_exact_with_heads_in_between(kind, shape, way) -> None:
    model = nn.Sequential(nn.Linear(D, D), kind(), nn.Linear(D, D))
    checked = way(model, 0.5).check(lambda x: model(x).tanh().flatten(1).sum(1), torch.randn(shape))

    assert checked.max_relative_error < 1e-5


def test_a_norm_that_is_used_twice_or_changes_its_epsilon(way) -> None:
    norm = Llama()
    model = nn.Sequential(nn.Linear(D, D), norm, nn.Tanh(), norm)
    clipping = way(model, 0.5)
    norm.variance_epsilon = 0.1
    checked = clipping.check(lambda x: model(x).tanh().sum((1, 2)), torch.randn(3, 5, D))

    assert checked.max_relative_error < 1e-5


def build(**options) -> nn.Sequential:
    norm = nn.BatchNorm2d(4, **options).requires_grad_(requires_grad=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    model.double()(torch.randn(8, 3, 6, 6, dtype=torch.float64))  # has statistics then
    norm.eval()
    return model


IMAGES = torch.randn(5, 3, 6, 6, dtype=torch.float64)


def losses_of(model):
    return lambda images: model(images).square().sum(1)


def test_samples_are_exact_through_a_frozen_norm(way) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    assert_exact(way, model, (IMAGES,), losses_of(model), bound=0.5, tolerance=1e-9)

    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "1.weight"):
        assert torch.equal(model.state_dict()[name], before[name])


def test_it_counts_as_no_layer() -> None:
    assert PerLayerClipping(build(), 1.0).bound == pytest.approx(1 / 2**0.5)


def test_training_mode_is_refused_whenever_it_comes() -> None:
    model = build()
    clipping = BookKeeping(model, 0.5)
    clipping.backward(losses_of(model)(IMAGES))
    model.zero_grad()
    model.train()

    with pytest.raises(UnsupportedError, match=r"BatchNorm2d mixes samples.*call eval\(\)"):
        model(IMAGES)
    copy.deepcopy(model)(IMAGES)  # a copy is a plain model
    model[1].eval()
    clipping.backward(losses_of(model)(IMAGES))
    clipping.remove()
    model.train()
    model(IMAGES)


class OverAxes(Llama):
    """Its axes are an attribute."""

    def __init__(self, axes, *, width: int = D) -> None:
        super().__init__()
        self.axes, self.weight = axes, nn.Parameter(torch.randn(width))

    def forward(self, x):
        y = x if x.dtype == torch.float64 else x.float()
        squares = y.pow(2).mean(tuple(self.axes), keepdim=True)
        return self.weight * (y * torch.rsqrt(squares + self.variance_epsilon)).to(x.dtype)


class OverChannels(OverAxes):
    """It normalises (B, T, d) over the last axis, and images over their channels."""

    def forward(self, x):
        return super().forward(x.mT).mT if x.dim() == 4 else super().forward(x)


LAST, SECOND, OF_A_LIST = OverAxes((-1,)), OverAxes((1,)), OverAxes([1])
NOT_OF_IMAGES, GAIN = OverChannels((-1,)), OverAxes((-1,), width=1)


def test_a_norm_is_recognised_by_all_its_attributes() -> None:
    assert [recognise(layer) is not None for layer in (LAST, SECOND, OverAxes((-1,)))] == [1, 0, 1]
    assert [recognise(OverAxes([axis])) is not None for axis in (-1, 1, -1)] == [1, 0, 1]
    assert recognise(NOT_OF_IMAGES) is None


@pytest.mark.parametrize("layer", [LAST, SECOND, OF_A_LIST, NOT_OF_IMAGES, GAIN])
@pytest.mark.parametrize("shape", [(4, D), (4, 5, D), (4, D, D, D), (4, 2, 3, 2, D)])
def test_a_norm_gives_its_own_values_for_any_number_of_axes(layer, shape, way) -> None:
    torch.manual_seed(0)
    layer, x = copy.deepcopy(layer).double(), torch.randn(shape, dtype=torch.float64)
    expected = layer(x)
    clipping = way(layer, 0.5)
    checked = clipping.check(lambda x: layer(x).tanh().flatten(1).sum(1), x)

    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    assert checked.max_relative_error < 1e-5


def test_a_norm_of_other_inputs_may_have_the_batch_second() -> None:
    layer, x = copy.deepcopy(GAIN), torch.randn(5, 4, D)
    clipping = BookKeeping(layer, 0.5, batch_second=[""])
    checked = clipping.check(lambda x: layer(x.transpose(0, 1)).tanh().sum((0, 2)), x)

    assert checked.max_relative_error < 1e-5


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        (nn.Module.train, {}, "mixes samples; use GroupNorm"),
        (nn.Module.requires_grad_, {}, "mixes samples; use GroupNorm"),
        (nn.Module.eval, {"track_running_stats": False}, "keeps no statistics"),
    ],
)
def test_what_is_not_frozen_or_keeps_no_statistics_is_refused(change, options, told) -> None:
    model = build(**options)
    change(model[1])
    with pytest.raises(UnsupportedError, match=told):
        BookKeeping(model, 0.5)


def test_one_that_is_thawed_is_refused() -> None:
    model = build()
    clipping = BookKeeping(model, 0.5)
    model[1].requires_grad_(requires_grad=True)

    with pytest.raises((RuntimeError, UnsupportedError), match="mixes samples"):
        clipping.backward(losses_of(model)(IMAGES))
