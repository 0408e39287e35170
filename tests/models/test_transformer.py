import pytest
import torch
from factory import make_experiment

from dpprof.models import presets
from dpprof.models.build import build_model
from dpprof.models.transformer import Transformer
from dpprof.spec.experiment import Dimensions


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
        model = Transformer(dimensions, seq_len=128)

    counted = sum(p.numel() for p in model.parameters())
    assert counted == expected_parameters(V, D, L, T=128)
    assert dimensions.heads == H


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(Dimensions(vocab_size=16, d_model=8, layers=2, heads=2), seq_len=6).double()


def test_no_token_sees_the_future(model) -> None:
    tokens = torch.randint(16, (3, 6))
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 16

    before, after = model(tokens), model(changed)

    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_samples_do_not_see_each_other(model) -> None:
    tokens = torch.randint(16, (3, 6))

    torch.testing.assert_close(model(tokens)[1], model(tokens[1:2])[0])


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
