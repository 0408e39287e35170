"""Convolutions, transposed ones, group and instance norms, against a loop over samples."""

import itertools

import pytest
import torch
from small_models import (
    EVERY,
    FLAT,
    Around,
    Composed,
    assert_exact,
    assert_exact_by_layer,
    assert_excluded,
    gradients,
    one_by_one,
    twice,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, FlashClipping, PerLayerClipping
from dpprof.private.layers.layers_without_rule import run_any_layer
from dpprof.private.layers.rules import find_rule
from dpprof.private.norms import convolution, tiles
from dpprof.private.norms.convolution import Kernel
from dpprof.private.norms.linear import GramSums
from dpprof.private.norms.placement import as_if_on_cuda
from dpprof.private.norms.rounding import depth_of_products

B, C = 4, 4

CASES = {
    "1 axis": (nn.Conv1d, (9,), {}),
    "2 axes": (nn.Conv2d, (6, 5), {"padding": 1}),
    "3 axes": (nn.Conv3d, (4, 3, 5), {"stride": (2, 1, 3), "padding": (1, 0, 2)}),
    "as many places as samples": (nn.Conv1d, (B,), {"padding": 1}),
    "stride and dilation": (nn.Conv2d, (9, 8), {"stride": 2, "dilation": (2, 1)}),
    "stride, no common factor with dilation": (nn.Conv2d, (9, 9), {"stride": 2, "dilation": 3}),
    "stride beyond the kernel": (nn.Conv2d, (9, 8), {"stride": (5, 4)}),
    "one element, strided": (nn.Conv2d, (6, 5), {"kernel_size": 1, "stride": (2, 3)}),
    "one element, strided and padded": (
        *(nn.Conv1d, (7,)),
        {"kernel_size": 1, "stride": 2, "padding": 1, "groups": 2},
    ),
    "groups": (nn.Conv2d, (6, 5), {"groups": 2, "stride": 2}),
    "depthwise": (nn.Conv2d, (6, 5), {"groups": C, "padding": "same"}),
    "no bias": (nn.Conv2d, (6, 5), {"bias": False}),
    "circular": (nn.Conv2d, (6, 5), {"padding": (1, 2), "padding_mode": "circular"}),
    "reflected": (nn.Conv1d, (6,), {"padding": "same", "padding_mode": "reflect"}),
    "replicated": (nn.Conv3d, (3, 4, 3), {"padding": 1, "padding_mode": "replicate"}),
    "valid": (nn.Conv2d, (6, 5), {"padding": "valid"}),
    "transposed, 1 axis": (nn.ConvTranspose1d, (5,), {}),
    "transposed, padded": (
        *(nn.ConvTranspose2d, (3, 4)),
        {"stride": 2, "padding": 1, "output_padding": (1, 0), "groups": 2},
    ),
    "transposed, 3 axes": (nn.ConvTranspose3d, (2, 3, 2), {"stride": 2, "bias": False}),
    "transposed, padded beyond its stride": (
        *(nn.ConvTranspose2d, (3, 4)),
        {"dilation": 3, "padding": (1, 2), "output_padding": (2, 1)},
    ),
}
"""Class, axes of space and options."""


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Make a layer behind another one, and a batch."""
    kind, axes, options = CASES[name]
    torch.manual_seed(0)
    layer = kind(C, 6 if options.get("groups") != C else 2 * C, **{"kernel_size": 3} | options)
    first = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(axes)](C, C, 1)
    return nn.Sequential(first, layer).double(), torch.randn(B, C, *axes).double()


def losses_by(model: nn.Module):
    return lambda x: model(x).flatten(1).tanh().square().sum(1)


@pytest.mark.parametrize("name", CASES)
def test_a_convolution_is_clipped_as_a_loop_clips_it(name, way) -> None:
    model, x = make(name)
    expected = model(x)

    clipping = assert_exact(way, model, (x,), losses_by(model), tolerance=1e-10)
    assert torch.equal(model(x), expected)
    assert "1.weight" in clipping.plan  # its own rule


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    "name",
    ["2 axes", "one element, strided", "stride and dilation", "groups", "transposed, padded"],
)
def test_few_samples_at_a_time_are_clipped_as_a_loop_clips_them(name, layout, monkeypatch) -> None:
    """The gradient of the first layer is made of that of the second one's input."""
    monkeypatch.setattr(tiles, "WORKSPACE_BYTES", 0)
    model, x = make(name)
    batch = (x.to(memory_format=layout),)
    model.to(memory_format=layout)
    assert_exact(BookKeeping, model, batch, losses_by(model), tolerance=1e-10)


@pytest.mark.parametrize("name", ["2 axes", "one element, strided", "transposed, padded"])
def test_a_batch_without_samples_has_no_gradient(name, way) -> None:
    model, x = make(name)
    clipping = way(model, 1.0)
    clipping.backward(losses_by(model)(x[:0].requires_grad_()))

    assert not torch.count_nonzero(gradients(model))
    clipping.remove()


def kernel_of(layer: nn.Module) -> Kernel:
    padding = (1,) * len(layer.stride) if isinstance(layer.padding, str) else layer.padding
    return Kernel(tuple(layer.weight.shape), layer.stride, padding, layer.dilation, layer.groups)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [one for one in CASES if "transposed" not in one])
def test_every_way_finds_the_gradients_that_autograd_finds(name, dtype) -> None:
    model, x = make(name)
    layer, x = model[1].requires_grad_(), x.to(dtype)
    layer.padding, layer.padding_mode = kernel_of(layer).padding, "zeros"
    g = torch.randn_like(layer(x.double())).to(dtype)
    exact = torch.stack(
        [
            torch.autograd.grad((layer(one[None].double()) * own.double()).sum(), layer.weight)[0]
            for one, own in zip(x, g, strict=True)
        ]
    ).detach()
    weights, u = torch.rand(B).double(), torch.randn(kernel_of(layer).width).double()
    given = (x, g, kernel_of(layer))
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5

    def assert_near(found, expected) -> None:
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        assert (found - expected).norm() <= tolerance * expected.norm()

    assert_near(convolution.sample_gradients(*given), exact)
    if dtype != torch.bfloat16:  # a CPU has no products with a float32 result
        with as_if_on_cuda():
            assert_near(convolution.sample_gradients(*given), exact)
    summed = convolution.sum_weighted(*given, weights.to(torch.promote_types(dtype, torch.float32)))
    assert_near(summed, torch.tensordot(weights, exact, 1))
    projected = convolution.project_rows(*given, u)
    assert_near(projected, exact.flatten(2) @ u)
    squares = convolution.product_squares(*given)
    assert_near(squares.found_B, exact.flatten(1).square().sum(1))
    if layer.groups == 1:
        grams = convolution.gram_sums(*given)
        assert isinstance(grams, GramSums)
        by_grams = grams.square()
        assert_near(by_grams.found_B, exact.flatten(1).square().sum(1))
        assert_near(by_grams.size_B, squares.size_B)


def test_shifted_gram_matrices_are_as_exact_as_those_of_windows() -> None:
    """Products of c channels, and then k - 1 additions."""
    for c, k in itertools.product(range(1, 300), range(1, convolution.MOST_OFFSETS + 1)):
        assert depth_of_products(c) + k - 1 <= depth_of_products(c * k)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_size_is_that_of_windows_and_output_gradients(groups) -> None:
    """A window of 3 over 4 places with padding 1 sees pixels 2, 3, 3 and 2 times."""
    kernel = Kernel((2, 2 // groups, 3), (1,), (1,), (1,), groups)
    x, g = (
        torch.tensor([[[1.0, 2, 3, 4], [0, 0, 1, 0]]]),
        torch.tensor([[[1.0, 0, 0, 1], [3, 0, 0, 0]]]),
    )
    first, second = 2 * 1 + 3 * 4 + 3 * 9 + 2 * 16, 3 * 1

    found = convolution.product_squares(x, g, kernel).size_B

    assert float(found) == ((first + second) * 11 if groups == 1 else first * 2 + second * 9)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@pytest.mark.parametrize(
    ("s", "d"), [(1, 1), (2, 1), (2, 2), (4, 2), (2, 4), (3, 3), (6, 4), (7, 7)]
)
def test_the_bound_of_windows_is_reached_by_a_pixel_that_most_windows_see(k, s, d) -> None:
    L, kernel = 20, Kernel((1, 1, k), (s,), (0,), (d,), 1)
    x = torch.eye((L - 1) * s + d * (k - 1) + 1)[:, None]  # a pixel for each sample
    g = torch.ones(len(x), 1, L)
    bound = convolution.bound_size(x, g, kernel, tiles.square)

    assert torch.equal(
        bound, convolution.product_squares(x, g, kernel).size_B.amax().expand(len(x))
    )


def test_channels_of_single_pixels_may_lie_last(way) -> None:
    """In groups PyTorch refuses these strides of axes of length 1, in float64."""
    model = nn.Conv2d(4, 4, 2, padding=1).double()
    x = torch.randn(B, 1, 1, 4).double().permute(0, 3, 1, 2)
    assert_exact(way, model, (x,), losses_by(model))


@pytest.mark.parametrize(
    ("kind", "options", "axes"),
    [
        (nn.ConvTranspose1d, {"stride": 2, "padding": 1, "output_padding": 1}, (1,)),
        (nn.ConvTranspose1d, {"kernel_size": 2, "padding": 1, "groups": 2}, (1,)),
        (nn.ConvTranspose2d, {"kernel_size": 2, "padding": (1, 0)}, (1, 5)),
    ],
)
def test_an_output_without_places_contributes_nothing(kind, options, axes, way) -> None:
    layer = kind(C, C, **{"kernel_size": 1} | options)
    first = {1: nn.Conv1d, 2: nn.Conv2d}[len(axes)](C, C, 1)
    model, x = nn.ModuleList([first, layer]), torch.randn(B, C, *axes)

    def losses_of(x, last=layer):
        hidden = first(x)
        return hidden.flatten(1).square().sum(1) + last(hidden).flatten(1).sum(1)

    # PyTorch has no such output of a single sample.
    without = lambda h: 0 * h.sum() * sum(p.sum() for p in layer.parameters()) + h[..., :0]  # noqa: E731
    expected = one_by_one(lambda x: losses_of(x, without), model, (x,))
    assert not layer(x).numel()
    assert_exact(way, model, (x,), losses_of, expected=expected, tolerance=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_a_gradient_that_is_left_when_places_cancel_is_clipped(seed, way) -> None:
    torch.manual_seed(seed)
    x = torch.randn(1, 128, 1, 1) + 1e-4 * torch.randn(1, 128, 6, 6)
    g = torch.randn(1, 128, 4, 4)
    g = 1e3 * (g - g.mean((2, 3), keepdim=True))
    layer = nn.Conv2d(128, 128, 3, bias=False)
    clipping = way(layer, 1.0)
    both = (layer(x.expand(2, -1, -1, -1)) * g).sum((1, 2, 3))  # of one alone, gradients are kept
    clipping.backward(both * torch.tensor([1.0, 0.0]))
    windows = x.double().unfold(2, 3, 1).unfold(3, 3, 1)
    exact = torch.einsum("bcijkl,boij->ockl", windows, g.double())

    assert exact.norm() > 10
    assert clipping.plan["weight"].way == "tiled gram"
    torch.testing.assert_close(clipping.sample_norms[0].double(), exact.norm(), rtol=1e-6, atol=0)
    assert (layer.weight.grad.double() - exact / exact.norm()).norm() <= 1e-5


def test_the_cheapest_way_is_taken() -> None:
    """As in a wide ResNet: many places keep gradients, few multiply Gram matrices."""
    clipping = BookKeeping(
        model := nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(4)), 1
    )
    wide = BookKeeping(other := nn.Conv2d(64, 64, 3, padding=1), 1)
    depthwise = FlashClipping(third := nn.Conv2d(64, 64, 3, padding=1, groups=64), 1)
    clipping.backward(model(torch.randn(2, 8, 16, 16)).square().sum((1, 2, 3)))
    wide.backward(other(torch.randn(2, 64, 4, 4)).square().sum((1, 2, 3)))
    depthwise.backward(third(torch.randn(2, 64, 4, 4)).square().sum((1, 2, 3)))

    assert clipping.plan["0.weight"].way == "kept product"
    assert wide.plan["weight"].way == "tiled gram"
    assert wide.plan["weight"].flops == 2 * 64 * (36 * 36 + 16 * 16)
    assert depthwise.plan["weight"].way == "tiled product"
    assert depthwise.plan["weight"].flops == 2 * 16 * 9 * 64


def make_shortcut() -> nn.Module:
    """Two convolutions of one input, whose outputs are added."""

    def add(m, x: Tensor) -> Tensor:
        y = x * 1
        return m.narrow(y) + m.wide(y)

    narrow, wide = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 3, padding=1)
    return Composed(add, narrow=narrow, wide=wide)


def test_what_another_layer_keeps_is_kept_in_place_of_a_gradient() -> None:
    """A gradient of 32 x 32 is smaller than 2 x 32 x 20 places, but takes memory of its own."""
    model, x = make_shortcut().double(), torch.randn(B, 32, 4, 5).double()
    alone = BookKeeping(layer := nn.Conv2d(32, 32, 1), 1.0)
    alone.backward(layer(x.float()).square().sum((1, 2, 3)))

    clipping = assert_exact(BookKeeping, model, (x,), losses_by(model), tolerance=1e-10)

    assert alone.plan["weight"].way == "kept product"
    assert clipping.plan["wide.weight"].way == "tiled gram"
    assert clipping.plan["narrow.weight"].way != "kept product"


def of_options(layer: nn.Module, **options) -> nn.Module:
    """Set options after construction; PyTorch accepts numbers for pairs, and None for a bias."""
    for name, value in options.items():
        setattr(layer, name, value)
    return layer


def variants() -> dict:
    conv = nn.Conv2d(C, C, 3, padding=1)
    tied, across = nn.Conv2d(C, C, 3, padding=1), nn.ConvTranspose2d(C, C, 3, padding=1)
    across.weight = tied.weight
    return {
        "channels last": Around(
            nn.Sequential(conv, nn.GroupNorm(2, C)),
            lambda layer, x: layer(x.contiguous(memory_format=torch.channels_last)),
        ),
        "in place after it": nn.Sequential(conv, nn.ReLU(inplace=True)),
        "checkpointed": Around(conv, lambda layer, x: checkpoint(layer, x, use_reentrant=False)),
        "twice": twice(conv),
        "twice, transposed": nn.Sequential(tied, nn.Tanh(), across),
        "options that are numbers": of_options(nn.Conv2d(C, C, 3), stride=2, padding=1, dilation=1),
        "frozen weight": conv_with(weight=False),
        "frozen bias": conv_with(bias=False),
        "output size": Around(
            nn.ConvTranspose2d(C, C, 3, stride=2), lambda layer, x: layer(x, output_size=(12, 11))
        ),
        "overridden kernel": Standardised(C, C, 3),
        "group norm": nn.GroupNorm(2, C),
        "group norm, frozen weight": conv_with(nn.GroupNorm(2, C), weight=False),
        "group norm, frozen bias": conv_with(nn.GroupNorm(2, C), bias=False),
        "group norm without bias": of_options(nn.GroupNorm(2, C), bias=None),
        "group norm of 2 axes": Around(nn.GroupNorm(2, C), lambda layer, x: layer(x.mean((2, 3)))),
        "group norm of a view": Around(
            nn.GroupNorm(2, C), lambda layer, x: layer(x.transpose(2, 3)[..., ::2])
        ),
        "group norm twice": twice(nn.GroupNorm(4, C)),
        "instance norm": nn.InstanceNorm2d(C, affine=True),
        "instance norm, 1 axis": Around(
            nn.InstanceNorm1d(C, affine=True), lambda layer, x: layer(x.flatten(2))
        ),
        "instance norm, 3 axes": Around(
            nn.InstanceNorm3d(C, affine=True), lambda layer, x: layer(x[:, :, None])
        ),
    }


def conv_with(layer: nn.Module | None = None, *, weight: bool = True, bias: bool = True):
    layer = layer or nn.Conv2d(C, C, 3, padding=1)
    layer.weight.requires_grad_(weight)
    layer.bias.requires_grad_(bias)
    return layer


class Standardised(nn.Conv2d):
    """It inherits forward, and overrides what that calls."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)


@pytest.mark.parametrize("name", variants())
def test_variants_are_clipped_as_a_loop_clips_them(name, way) -> None:
    middle = variants()[name]
    model = nn.Sequential(nn.Conv2d(C, C, 1), middle).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(B, C, 5, 5).double()

    assert_exact(way, model, (x,), losses_by(model), tolerance=1e-10)


def test_in_float32_and_of_one_sample(way) -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2), nn.InstanceNorm2d(32, affine=True)),
    )
    x = torch.randn(5, 3, 12, 12)
    assert_exact(way, model, (x,), losses_by(model), tolerance=2e-3)  # norms have slack
    model.zero_grad()
    alone = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False))
    assert_exact(way, alone, (x[:1],), losses_by(alone), bound=0.1, tolerance=1e-5)


def test_per_layer_clipping_clips_each_convolution() -> None:
    model, x = make("2 axes")
    assert len(assert_exact_by_layer(model, (x,), losses_by(model), bound=0.5).groups) == 2


def test_a_sample_that_is_not_finite_contributes_nothing(way) -> None:
    model, x = make("groups")
    model.append(nn.GroupNorm(2, 6).double())
    model.append(nn.Conv2d(6, 40, 2).double())  # its norm is by Gram matrices
    x[1, 0, 2, 2] = torch.nan
    assert_excluded(way, model, (x,), losses_by(model), at=1)


@pytest.mark.parametrize(("channels", "groups"), [(3, 1), (16, 1), (64, 1), (16, 16)])
def test_such_a_sample_does_not_change_the_others_by_a_bit(channels, groups) -> None:
    """Samples are groups of one convolution, whose kernels handle channels in blocks."""
    kernel = Kernel((16, channels // groups, 3, 3), (1, 1), (1, 1), (1, 1), groups)
    x, g = torch.randn(B, channels, 8, 8), torch.randn(B, 16, 8, 8)
    others = [0, 2, 3]
    found = convolution.sample_gradients(x, g, kernel)
    x[1], g[1] = torch.nan, torch.inf

    assert torch.equal(convolution.sample_gradients(x, g, kernel)[others], found[others])


@pytest.mark.parametrize("way", EVERY)
def test_under_autocast_sums_are_of_16_bit_gradients(way) -> None:
    """As far from float32 as bfloat16 is; and one sample alone keeps its bound exactly."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 40, 3))
    x = torch.randn(3, 3, 8, 8)
    clipping = way(model, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    losses = y.float().square().sum((1, 2, 3))
    clipping.backward(losses * torch.tensor([1.0, 0, 0]))
    found = gradients(model)
    clipping.remove()
    model.zero_grad()
    losses_by_square = lambda x: model(x).square().sum((1, 2, 3))  # noqa: E731
    _, exact, _ = one_by_one(losses_by_square, model, (x[:1],), 0.1)

    assert y.dtype == torch.bfloat16
    assert 0.09 < found.norm() <= 0.1 * (1 + 2**-8)
    if way is not PerLayerClipping:
        assert (found - exact).norm() <= 0.05 * exact.norm()


def test_frames_of_a_sample_may_lie_on_the_first_axis(way) -> None:
    """The graph shows that they do: two for each of two samples."""
    model, x = make("2 axes")

    def losses_of(x: Tensor) -> Tensor:
        y = model(x.flatten(0, 1))
        return y.view(len(x), -1).square().sum(1)

    assert_exact(way, model, (x.view(2, 2, *x.shape[1:]),), losses_of, tolerance=1e-10)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(C, C, 3), (C, 5, 5)),
        (nn.Conv1d(C, C, 3, padding=1, padding_mode="circular"), (C, 5)),
        (nn.ConvTranspose1d(C, C, 3), (C, 5)),
        (nn.InstanceNorm1d(C, affine=True), (C, 5)),
        (nn.GroupNorm(2, C), (C,)),
        (nn.InstanceNorm2d(C, affine=True), (B, C, 1, 1)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_inputs_without_samples_are_refused_in_a_sentence(layer, shape) -> None:
    clipping = BookKeeping(layer, 1.0)
    with pytest.raises(ValueError, match=r"batch axis|several values"):
        layer(torch.randn(shape))
    clipping.remove()


def test_a_layer_whose_forward_calls_other_code_runs_without_a_rule() -> None:
    replaced = nn.Conv2d(C, C, 3)
    replaced._conv_forward = lambda x, *_: x

    assert find_rule(Standardised(C, C, 3)).rule is run_any_layer
    assert find_rule(replaced).rule is run_any_layer
    assert find_rule(nn.InstanceNorm2d(C, affine=True)).rule is not run_any_layer


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Return how many bytes the graph of a model holds, without parameters."""
    saved: dict[int, int] = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    assert y.requires_grad
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    return sum(nbytes for storage, nbytes in saved.items() if storage not in own)


def test_no_more_activations_are_kept_than_without_clipping() -> None:
    model, x = make("circular")
    model.append(nn.GroupNorm(2, 6).double())
    plain = saved_bytes(model, x)
    BookKeeping(model, 1.0)

    assert saved_bytes(model, x) == plain > 0


def every_option() -> list:
    options = itertools.product(
        *((1, 2, 3), (False, True), (1, 2, C), (1, 2, 3), (1, 2), (0, 1, "same")),
        ("zeros", "circular", "reflect", "replicate"),
    )
    return [
        one
        for one in options
        if not (one[1] and (one[5] == "same" or one[6] != "zeros"))
        and not (one[5] == "same" and one[3] > 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", every_option(), ids=str)
def test_all_options(options) -> None:
    axes, transposed, groups, stride, dilation, padding, mode = options
    torch.manual_seed(0)
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{axes}d")
    given = {"stride": stride, "dilation": dilation, "padding": padding, "padding_mode": mode}
    more = {"output_padding": max(stride, dilation) - 1} if transposed else {}
    layer = kind(C, 2 * C, (3, 2, 3)[:axes], groups=groups, **given, **more)
    model = nn.Sequential(getattr(nn, f"Conv{axes}d")(C, C, 1), layer).double()
    x = torch.randn(3, C, *(7, 6, 8)[:axes]).double()
    for way in FLAT:
        assert_exact(way, model, (x,), losses_by(model), tolerance=1e-10).remove()
        model.zero_grad()
