"""The variants are one function, and none lets a token see a later one."""

import pytest
import torch
from torch import Tensor

from dpprof.models.transformer import find_attention

VARIANTS = ["sdpa", "eager", "opacus"]
SHAPES = [(1, 1), (2, 5), (5, 2), (4, 4), (3, 40)]  # B, T; also B = T, where axes can hide
D, HEADS = 12, 3


def build(name: str) -> torch.nn.Module:
    """Build a variant with the weights that all variants get."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(4 * D, D, generator=draw, dtype=torch.float64)
    bias = torch.randn(4 * D, generator=draw, dtype=torch.float64)
    module = find_attention(name)(D, HEADS).double()
    if name == "opacus":
        inner = module.attention
        layers = [getattr(inner, f"{part}linear").layer for part in "qkv"] + [inner.out_proj.layer]
    else:
        layers = [module.qkv, module.out]
    sizes = [layer.out_features for layer in layers]
    with torch.no_grad():
        for layer, w, b in zip(layers, weight.split(sizes), bias.split(sizes), strict=True):
            layer.weight.copy_(w)
            layer.bias.copy_(b)
    return module


def inputs(B: int, T: int) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def attend(x_TD: Tensor) -> Tensor:
    """Attention over one sample, written out with loops."""
    module = build("sdpa")
    q, k, v = module.qkv(x_TD).split(D, dim=1)
    rows = []
    for t in range(len(x_TD)):
        heads = []
        for part in torch.arange(D).split(D // HEADS):
            scores = k[: t + 1, part] @ q[t, part] / (D // HEADS) ** 0.5
            heads.append(torch.exp(scores) / torch.exp(scores).sum() @ v[: t + 1, part])
        rows.append(torch.cat(heads))
    return module.out(torch.stack(rows))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_causal_attention(name, shape) -> None:
    x_BTD = inputs(*shape)

    expected = torch.stack([attend(x_TD) for x_TD in x_BTD])
    torch.testing.assert_close(build(name)(x_BTD), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_as_many_in_every_variant(name) -> None:
    assert sum(p.numel() for p in build(name).parameters()) == 4 * D * D + 4 * D
