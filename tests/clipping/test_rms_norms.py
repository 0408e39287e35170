"""RMS norms are recognised by what they compute, and run as before."""

import pytest
import torch
from small_models import FLAT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpprof.predict.memory.recorder import Recorder
from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.layers.layers_without_rule import run_any_layer
from dpprof.private.layers.normalisations import recognise
from dpprof.private.layers.rules import find_rule

D = 6


def normalise(x, eps: float):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Llama(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        x = normalise(hidden_states.to(torch.float32), self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class Olmo(Llama):
    def forward(self, hidden_states):
        x = normalise(hidden_states.to(torch.float32), self.variance_epsilon)
        return (self.weight * x).to(hidden_states.dtype)


class Gemma(Llama):
    def forward(self, x):
        y = normalise(x.float(), self.variance_epsilon)
        return (y * (1.0 + self.weight.float())).type_as(x)


class OfFloat64(Llama):
    """It casts nothing, so float64 stays float64."""

    def forward(self, x):
        return normalise(x, self.variance_epsilon) * self.weight


class Fixed(Llama):
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
    found = recognise(kind(1e-5))

    assert found == ("weight", "variance_epsilon", *KNOWN[kind])


@pytest.mark.parametrize("kind", OTHERS)
def test_anything_else_stays_with_torch_func(kind) -> None:
    layer = kind().eval()  # where dropout is off

    assert find_rule(layer) == (run_any_layer, kind)


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
    torch.manual_seed(0)
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


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("shape", [(3, D), (3, 5, D), (3, 2, 5, D)])
def test_norms_of_samples_are_exact_with_heads_in_between(kind, shape, way) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), kind(), nn.Linear(D, D))
    checked = way(model, 0.5).check(lambda x: model(x).tanh().flatten(1).sum(1), torch.randn(shape))

    assert checked.max_relative_error < 1e-5


@pytest.mark.parametrize("way", FLAT)
def test_a_norm_that_is_used_twice_or_changes_its_epsilon(way) -> None:
    torch.manual_seed(0)
    norm = Llama()
    model = nn.Sequential(nn.Linear(D, D), norm, nn.Tanh(), norm)
    clipping = way(model, 0.5)
    norm.variance_epsilon = 0.1
    checked = clipping.check(lambda x: model(x).tanh().sum((1, 2)), torch.randn(3, 5, D))

    assert checked.max_relative_error < 1e-5
