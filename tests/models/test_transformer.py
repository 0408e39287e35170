"""dpprof's transformer: its sizes, its variants of attention, its dtypes, and who sees whom."""

import pytest
import torch
from factory import make_experiment
from torch import Tensor

from dpprof.experiments.config.naming import Dimensions
from dpprof.subjects.models import presets
from dpprof.subjects.models.build import apply_dtype, build_model
from dpprof.subjects.models.transformer import Transformer, find_attention


def expected_parameters(V: int, D: int, L: int, T: int) -> int:
    """Count by hand: embeddings, blocks (norms, qkv, out, MLP with biases), norm, head."""
    attention = D * 3 * D + 3 * D + D * D + D
    mlp = D * 4 * D + 4 * D + 4 * D * D + D
    block = attention + mlp + 2 * 2 * D
    return V * D + T * D + L * block + 2 * D + D * V


@pytest.mark.parametrize(
    ("dimensions", "size"),
    [
        (presets.TINY, (1_000, 64, 2, 4)),
        (presets.SMALL, (8_000, 256, 4, 8)),
        (presets.MEDIUM, (16_000, 512, 8, 8)),
        (presets.ONE_BILLION, (32_000, 2_048, 24, 32)),
    ],
)
def test_presets_have_the_published_sizes(dimensions, size) -> None:
    V, D, L, H = size
    with torch.device("meta"):
        model = Transformer(dimensions, make_experiment(seq_len=128))

    counted = sum(p.numel() for p in model.parameters())
    assert counted == expected_parameters(V, D, L, T=128)
    assert dimensions.heads == H


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    dimensions = Dimensions(vocab_size=16, d_model=8, layers=2, heads=2)
    return Transformer(dimensions, make_experiment(seq_len=6)).double()


def test_positions_matter(model) -> None:
    tokens = torch.full((1, 6), 3)

    assert not torch.allclose(model(tokens)[0, 0], model(tokens)[0, 1])


def test_no_parameter_is_shared_and_every_one_sits_in_a_layer_opacus_knows(model) -> None:
    owners = {type(m) for m in model.modules() if list(m.parameters(recurse=False))}

    assert {owner.__name__ for owner in owners} == {"Linear", "Embedding", "LayerNorm"}
    assert model.head.weight.data_ptr() != model.token_embedding.weight.data_ptr()


def test_a_preset_and_its_dimensions_build_the_same_model() -> None:
    named = build_model(make_experiment(model="tiny", seq_len=4))
    spelled = build_model(make_experiment(model=presets.TINY.model_dump(), seq_len=4))

    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (named, spelled)]
    assert shapes[0] == shapes[1]


VARIANTS = ["sdpa", "eager", "opacus"]
SHAPES = [(1, 1), (2, 5), (5, 2), (4, 4), (3, 40)]  # B, T; also B = T, where axes can hide
D, HEADS = 12, 3


def build_variant(name: str) -> torch.nn.Module:
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
    module = build_variant("sdpa")
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
    torch.testing.assert_close(build_variant(name)(x_BTD), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_as_many_in_every_variant(name) -> None:
    assert sum(p.numel() for p in build_variant(name).parameters()) == 4 * D * D + 4 * D


CASES = {
    "float32": (torch.float32, torch.float32, torch.float32),
    "tf32": (torch.float32, torch.float32, torch.float32),
    "bfloat16": (torch.float32, torch.bfloat16, torch.float32),
    "float64": (torch.float64, torch.float64, torch.float64),
}


@pytest.mark.parametrize("dtype", CASES)
def test_parameters_products_and_logits_have_the_dtypes_promised(dtype) -> None:
    experiment = make_experiment(dtype=dtype)
    model = apply_dtype(build_model(experiment), experiment, torch.device("cpu"))
    products = []
    model.head.register_forward_hook(lambda _, __, output: products.append(output.dtype))
    logits = model(torch.zeros(2, 4, dtype=torch.int64))

    assert (next(model.parameters()).dtype, products[0], logits.dtype) == CASES[dtype]
    logits.sum().backward()
    assert model.head.weight.grad.dtype == CASES[dtype][0]
