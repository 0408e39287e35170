"""Inputs whose products cancel, tables that differ, 16 bits: no way round the bound."""

import itertools

import pytest
import torch
from small_models import EVERY, Composed, assert_exact, gradients
from torch import nn
from torch.nn import functional

from dpprof.private import PerLayerClipping
from dpprof.private.contributions.contributions import Lookup, Product
from dpprof.private.contributions.sample_gradients import SampleGradients
from dpprof.private.contributions.uses import merge_uses
from dpprof.private.engine.factor import LARGEST_BOUND, LEAST_BOUND, LEAST_STABILITY
from dpprof.private.norms.linear import WAYS, GramSums
from dpprof.private.norms.rounding import depth_of_products, is_unsure
from dpprof.private.norms.tiles import multiply_in_slices, square

C = 1.0


def cancelling(seed: int, T: int = 16, d: int = 512, p: int = 512) -> tuple[torch.Tensor, ...]:
    """Inputs that are nearly equal over tokens, output gradients that nearly sum to nothing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, d, generator=generator) + 1e-4 * torch.randn(1, T, d, generator=generator)
    g = torch.randn(1, T, p, generator=generator)
    return x, 1e3 * (g - g.mean(1, keepdim=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_gradient_that_is_left_when_tokens_cancel_is_clipped(seed, way) -> None:
    x, g = cancelling(seed)
    layer = nn.Linear(512, 512, bias=False)
    clipping = way(layer, C)
    both = (layer(x.expand(2, -1, -1)) * g).sum((1, 2))  # of one alone, the gradient is kept
    clipping.backward(both * torch.tensor([1.0, 0.0]))
    exact = torch.einsum("btd,btp->pd", x.double(), g.double())

    assert exact.norm() > 10 * C
    assert clipping.plan["weight"].way == "tiled gram"
    torch.testing.assert_close(clipping.sample_norms[0].double(), exact.norm(), rtol=1e-6, atol=0)
    assert (layer.weight.grad.double() - exact / exact.norm()).norm() <= 1e-5 * C


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_squares_and_their_slack_are_not_below_the_true_ones(dtype, way) -> None:
    for seed in range(10):
        x, g = (part.to(dtype) for part in cancelling(seed, 300, 40, 50))
        exact = torch.einsum("btd,btp->bdp", x.double(), g.double()).square().sum((1, 2))
        size = x.double().square().sum() * g.double().square().sum()
        measured = WAYS[way](x, g)
        is_gram = isinstance(measured, GramSums)
        found_B, slack_B, size_B = measured.square() if is_gram else measured

        assert float(size_B) == pytest.approx(float(size), rel=1e-4)
        if slack_B is None:
            slack_B = 1e-12 * size_B  # made of a gradient: wrong in proportion to its terms
        assert found_B.double() + slack_B.double() >= exact


@pytest.mark.parametrize(
    ("way", "T", "d", "p", "common"),
    [
        ("tiled gram", 1024, 256, 256, 1.0),
        ("tiled gram", 64, 64, 128_000, 1.0),
        ("tiled product", 8192, 128, 128, 0.0),
        ("tiled product", 1024, 256, 8, 2.0),
    ],
)
def test_no_sample_is_unsure_in_ordinary_batches(way, T, d, p, common) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, T, d, generator=generator) + common * torch.randn(1, 1, d)
    g = torch.randn(1, T, p, generator=generator)
    if p > 10_000:  # of a cross-entropy
        g = g.softmax(2)
        g[0, :, :T] -= torch.eye(T)
    measured = WAYS[way](x, g)

    assert not is_unsure(measured.square() if isinstance(measured, GramSums) else measured, 0.0)


def test_two_tables_that_share_a_weight_have_each_its_own_padding(way) -> None:
    tables = {"one": nn.Embedding(4, 3, padding_idx=1), "other": nn.Embedding(4, 3)}
    tables["other"].weight = tables["one"].weight
    model = Composed(lambda m, ids: m.one(ids) + 2 * m.other(ids), **tables).double()
    ids = torch.tensor([[1, 1, 1], [0, 2, 1]])
    assert_exact(way, model, (ids,), lambda ids: 10 * model(ids).sum((1, 2)), bound=0.01)


def test_lookups_of_unlike_padding_merge_into_one_without() -> None:
    g = torch.ones(1, 2, 3)
    ids = torch.tensor([[0, 1]])
    (merged,) = merge_uses([Lookup(ids, g, 4, 1), Lookup(ids, g, 4, -1)])

    assert merged.padding == -1
    assert merged.g_BTd[0, :, 0].tolist() == [1, 0, 1, 1]


def test_squares_of_16_bits_are_summed_in_32() -> None:
    gradients = torch.randn(1, 2**22, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = gradients.double().square().sum()

    assert float(square(gradients)) == pytest.approx(float(exact), rel=1e-5)


def test_a_factor_is_not_rounded_to_the_16_bits_of_what_it_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g, made = (torch.randn(1, 64, 50, generator=generator).bfloat16() for _ in range(3))
    factor = torch.tensor([0.33301])  # bfloat16 would make 0.3340 of it, 0.3 % more
    scaled = factor.double() * g.double()[0]
    for contribution, expected, rel in (
        (Product(x, g), scaled.t() @ x.double()[0], 1e-3),
        (Lookup(torch.arange(64)[None], g, 64, -1), scaled, 1e-3),
        (SampleGradients(made), factor.double() * made.double()[0], 1e-6),
    ):
        found = contribution.sum(factor)
        assert found.dtype == torch.float32
        assert float(found.double().norm()) == pytest.approx(float(expected.norm()), rel=rel)


class Own(nn.Conv1d):
    """A convolution whose forward is its own, so that no rule knows it."""

    def forward(self, x):
        return self._conv_forward(x, self.weight, self.bias)


def test_autocast_layers_without_a_rule_are_clipped_to_the_bound(way) -> None:
    model = Own(64, 256, 3)
    x = torch.randn(1, 64, 40)
    clipping = way(model, 0.01)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(x).float().square().sum((1, 2))
    clipping.backward(losses)

    assert float(gradients(model).norm()) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms_of_ordinary_inputs_are_not_told_larger(dtype, way) -> None:
    model = nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 96)).to(dtype)
    tolerance = {torch.float32: 1e-3, torch.float64: 1e-12}[dtype]
    assert_told_exactly(way, model, torch.randn(3, 24, 96, dtype=dtype), 96, tolerance)


def test_norms_before_a_large_vocabulary_are_not_told_larger(way) -> None:
    head = nn.Linear(512, 30_000, bias=False)
    x = torch.randn(2, 64, 512) + torch.randn(2, 1, 512)  # tokens with much in common
    assert_told_exactly(way, head, x, 30_000, 1e-3)


def assert_told_exactly(way, model, x, V: int, tolerance: float) -> None:
    """By Gram matrices."""

    def losses_of(x, labels):
        return functional.cross_entropy(model(x).mT, labels, reduction="none").mean(1)

    batch = x, torch.randint(V, x.shape[:2])
    clipping = assert_exact(way, model, batch, losses_of, bound=1.0, tolerance=tolerance)
    assert {one.way for one in clipping.plan.values()} == {"tiled gram"}


@pytest.mark.parametrize("terms", [1, 100, 128, 129, 1000, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_in_slices_are_as_exact_as_is_said(terms, dtype) -> None:
    """Terms of one sign: each sum that is rounded moves the result the same way, or another."""
    generator = torch.Generator().manual_seed(0)
    for shift in (0.0, 1.0, 100.0):
        a = (shift + torch.rand(1, 40, terms, generator=generator)).to(dtype)
        exact = a.double() @ a.double().mT
        sizes = exact.diagonal(dim1=1, dim2=2).sqrt()
        error = (multiply_in_slices(a, a.mT).double() - exact).abs()
        unit = torch.finfo(torch.float32).eps / 2

        assert (error <= depth_of_products(terms) * unit * sizes[:, :, None] * sizes[:, None]).all()
    assert depth_of_products(terms) <= terms or terms < 200


BOUNDS = [LEAST_BOUND, 7e-33, 1e-27, 1e-12, 1.0, 1e12, LARGEST_BOUND]


def test_a_batch_at_the_largest_bound_has_a_sum(way) -> None:
    layer = nn.Linear(1, 1, bias=False)
    with pytest.raises(
        ValueError, match="to 1e\\+33, with which sums of 65,536 samples stay in flo"
    ):
        way(layer, 1e38)
    clipping = way(layer, LARGEST_BOUND)
    clipping.backward(layer(torch.ones(64, 1))[:, 0] * 1e38)
    assert float(layer.weight.grad) == pytest.approx(64 * LARGEST_BOUND, rel=1e-5)
    assert torch.finfo(torch.float32).max / 4 > 2**16 * LARGEST_BOUND


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("bound", BOUNDS)
def test_every_bound_is_kept_for_gradients_of_every_size(bound, way) -> None:
    """Also where factors are too small for float32, and inputs much smaller than gradients."""
    stability = max(LEAST_STABILITY, bound / 2**39)
    options = [{}, {"loss_scale": 2.0**16}]
    if way is not PerLayerClipping and stability < 1e30:
        options.append({"stability": stability})
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 3, 8, generator=generator), torch.randn(2, 3, 6, generator=generator)
    for option in options:
        for power, of_inputs in itertools.product([-36, -9, -4, 1, 13, 25, 33], [0, -22, 15]):
            layer = nn.Linear(8, 6, bias=False)
            clipping = way(layer, bound, first_batch="trusted", **option)
            inputs, weights = x * 10.0**of_inputs, g * 10.0 ** max(-38, power - of_inputs)
            losses = (layer(inputs) * weights).sum((1, 2)) * torch.tensor([1.0, 0.0])
            if not losses.isfinite().all():
                continue
            clipping.backward(losses)
            exact = weights[0].double().t() @ inputs[0].double()
            factor = bound / (exact.norm() + option.get("stability", 1e-6))
            if "stability" not in option:
                factor.clamp_(max=1)
            if clipping.nonfinite_samples:  # scaled gradients overflow
                largest = max(exact.norm(), weights[0].double().norm())
                assert largest * option["loss_scale"] > 1e37
                factor.zero_()
            error = (layer.weight.grad.double() - exact * factor).norm()
            assert error <= 2**-8 * bound, (option, power, of_inputs)
