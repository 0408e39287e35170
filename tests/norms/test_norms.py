"""Every way to a norm gives the norm of the gradient that it does not make."""

import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.memory.timeline import MemoryTimeline
from dpprof.private.norms import linear
from dpprof.private.norms.code_paths import Way
from dpprof.private.norms.linear import WAYS, choose_way, gram_rows, price_gram, price_product
from dpprof.private.norms.scale import scale_gradients
from dpprof.private.norms.table import inner_product, square_lookup
from dpprof.private.norms.tiles import WORKSPACE_BYTES

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-5}


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("T", "d", "p"), [(1, 300, 530), (17, 3, 1), (256, 300, 7), (300, 9, 530)])
def test_squares_of_a_product(way, dtype, T, d, p) -> None:
    for B in (1, 3):
        x, g = draw(B, T, d, dtype=dtype), draw(B, T, p, dtype=dtype)
        x[-1] = 0
        expected = torch.einsum("btd,btp->bdp", x.double(), g.double()).square().sum((1, 2))

        found = WAYS[way](x, g).found_B

        # Whatever the operands are, they are multiplied and summed in float32 at least.
        assert found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_any_strides_and_no_samples(way) -> None:
    x = draw(20, 4, 3).transpose(0, 2)[:, :, ::2]
    g = draw(3, 4, 1).expand(3, 4, 6)

    expected = torch.einsum("btd,btp->bdp", x, g).square().sum((1, 2))
    torch.testing.assert_close(WAYS[way](x, g).found_B, expected, rtol=1e-12, atol=0)
    assert WAYS[way](x[:0], g[:0]).found_B.shape == (0,)


@pytest.mark.parametrize("way", ["tiled gram", "tiled product"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 2000, 40, 50), (9, 300, 900, 40), (2, 9, 9, 4000), (1, 6000, 8, 8)]
)
def test_workspace_is_bounded_whatever_the_shape(way, dtype, shape) -> None:
    B, T, d, p = shape
    x, g = draw(B, T, d, dtype=dtype), draw(B, T, p, dtype=dtype)
    with Recorder(is_there=lambda *_: True) as recorder:
        squares = WAYS[way](x, g)
        del squares

    timeline = MemoryTimeline(recorder, {}, (0, len(recorder.events)))
    assert timeline.totals[-1] == 0
    assert 0 < timeline.peak_bytes <= WORKSPACE_BYTES


IN_PLACE = {torch.ops.aten.baddbmm_: lambda _, a, b, **__: 2 * math.prod(a) * b[2]}
"""The FLOPs of what PyTorch does not count."""


@pytest.mark.parametrize(("T", "d", "p"), [(100, 30, 40), (600, 30, 40), (300, 700, 1100)])
def test_flops_are_those_of_the_formulas(T, d, p) -> None:
    for way, price in {"tiled gram": price_gram, "tiled product": price_product}.items():
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            WAYS[way](draw(2, T, d), draw(2, T, p))

        assert counter.get_total_flops() == 2 * price(T, d, p).flops


def test_the_gram_way_leaves_half_of_the_matrices_out() -> None:
    T, d, p = 4096, 8, 8
    panels = T // gram_rows(T)

    full = 2 * T * T * (d + p)
    assert price_gram(T, d, p).flops == full * (panels + 1) / (2 * panels)


@pytest.mark.parametrize("columns", [3, 20, 4096])
@pytest.mark.parametrize("T", [1, 63, 64, 197, 300])
def test_panels_hold_each_pair_of_tokens_twice_and_the_diagonal_once(
    monkeypatch, T, columns
) -> None:
    monkeypatch.setattr(linear, "GRAM_COLUMNS", columns)
    x, g = draw(2, T, 5), draw(2, T, 7)
    A, B = x @ x.mT, g @ g.mT
    sums = [(A * B).sum((1, 2)), x.square().sum((1, 2)), g.square().sum((1, 2))]
    sums += [one.square().sum((1, 2)) for one in (A, B)]

    torch.testing.assert_close(WAYS["tiled gram"](x, g).sums_5B, torch.stack(sums))


NORMS, KEPT = {"keeps": False}, {"keeps": True}
CORES = {"keeps": True, "on_tensor_cores": True}


@pytest.mark.parametrize(
    ("T_d_p_and_bytes", "options", "way"),
    [
        ((64, 1024, 4096, 4), NORMS, "tiled gram"),  # few tokens, a large matrix
        ((4096, 256, 256, 4), NORMS, "tiled product"),  # many tokens, a small one
        ((64, 1024, 4096, 4), KEPT, "tiled gram"),  # T (d + p) < d p
        ((4096, 256, 256, 4), KEPT, Way.KEPT),
        ((50, 100, 100, 4), KEPT, Way.KEPT),  # T (d + p) = d p
        ((49, 100, 100, 4), KEPT, "tiled gram"),
        ((1024, 2048, 2048, 2), CORES, "tiled gram"),  # 12 d p bytes take longer than Gram matrices
        ((2048, 2048, 2048, 2), CORES, Way.KEPT),
        ((1024, 1024, 1024, 2), CORES, Way.KEPT),
        ((512, 2048, 2048, 2), CORES, "tiled gram"),  # T (d + p) < d p
    ],
)
def test_the_plan_for_these_shapes(T_d_p_and_bytes, options, way) -> None:
    assert choose_way(*T_d_p_and_bytes, **options).way == way


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("T", [1, 17, 256])
def test_squares_of_a_lookup(dtype, T) -> None:
    ids = torch.randint(5, (3, T), generator=torch.Generator().manual_seed(0))
    ids[0] = 4  # one id all over
    g = draw(3, T, 130, dtype=dtype)
    dense = torch.zeros(3, 5, 130, dtype=torch.float64)
    for b, t in itertools.product(range(3), range(T)):
        dense[b, ids[b, t]] += g[b, t].double()

    found = square_lookup(ids, g).found_B

    expected = dense.square().sum((1, 2))
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("with_mean", [True, False])
def test_gradients_of_a_scale(with_mean) -> None:
    x, g = draw(3, 50, 7), draw(3, 50, 7) + 1
    mean, rstd = x.mean(2, keepdim=True), x.std(2, keepdim=True).reciprocal()
    normalised = ((x - mean) if with_mean else x) * rstd

    mean = mean if with_mean else None
    sums_Bd, of_shift, squares_B = scale_gradients(x, g, mean, rstd, shifted=True)

    assert of_shift is None  # another pass costs no more here
    torch.testing.assert_close(sums_Bd, (g * normalised).sum(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(squares_B, (g * normalised).square().sum((1, 2)))


def test_inner_product_of_two_uses_of_a_matrix() -> None:
    ids = torch.randint(9, (2, 300), generator=torch.Generator().manual_seed(0))
    e, x, g = draw(2, 300, 6), draw(2, 270, 6), draw(2, 270, 9)
    of_table = torch.zeros(2, 9, 6, dtype=torch.float64)
    for b, t in itertools.product(range(2), range(300)):
        of_table[b, ids[b, t]] += e[b, t]
    of_matrix = g.transpose(1, 2) @ x

    products_B = inner_product(ids, e, x, g).found_B
    torch.testing.assert_close(products_B, (of_table * of_matrix).sum((1, 2)), rtol=1e-9, atol=0)
