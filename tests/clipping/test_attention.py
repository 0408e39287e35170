"""PyTorch's attention, and the Transformers that are made of it, are clipped exactly."""

import pytest
import torch
from products import one_in
from small_models import assert_exact, assert_exact_in_every_way, is_clear
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, UnsupportedError

B = T = S = 4  # of the same length: nothing may depend on lengths
E, HEADS = 6, 2
FORMS = (
    {},
    {"bias": False},
    {"kdim": 3, "vdim": 5},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 3, "vdim": 5, "add_bias_kv": True},
)
INPUTS = ("one", "two", "three")
MASKS = ("none", "of keys", "of pairs", "of heads", "causal", "both")
NOT_ALLOWED = torch.ones(T, S, dtype=torch.bool).triu(1)


def make_masks(kind: str, padding_BS, scores_BHTS):
    return {
        "none": {},
        "of keys": {"key_padding_mask": padding_BS},
        "of pairs": {"attn_mask": NOT_ALLOWED},
        "of heads": {"attn_mask": scores_BHTS.flatten(0, 1)},
        "causal": {"attn_mask": NOT_ALLOWED, "is_causal": True},
        "both": {"attn_mask": scores_BHTS.flatten(0, 1), "key_padding_mask": -padding_BS.double()},
    }[kind]


def draw(model, inputs: str):
    """Queries, keys, values, padding and what is added to scores, samples first."""
    widths = [E, model.kdim, model.vdim]
    parts = [torch.randn(B, T, width, dtype=torch.float64) for width in widths]
    padding = torch.arange(S) >= torch.tensor([4, 2, 3, 1])[:, None]
    used = parts[: INPUTS.index(inputs) + 1]
    return *used, padding, torch.randn(B, HEADS, T, S, dtype=torch.float64)


@pytest.mark.parametrize(
    ("form", "inputs", "mask", "batch_first", "weights"),
    one_in(
        11,
        *(FORMS, INPUTS, MASKS, (True, False), ("averaged", "whole", "none")),
        unless=lambda form, inputs, *_: "kdim" in form and inputs != "three",
    ),
)
def test_attention_is_exact(form, inputs, mask, batch_first, weights) -> None:
    model = nn.MultiheadAttention(E, HEADS, batch_first=batch_first, **form).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)

    def run(*batch):
        *given, padding, scores = batch
        if not batch_first:
            given = [x.transpose(0, 1) for x in given]
        query, key, value = given + [given[-1]] * (3 - len(given))
        options = {"need_weights": weights != "none", "average_attn_weights": weights != "whole"}
        y, found = model(query, key, value, **make_masks(mask, padding, scores), **options)
        losses = (y if batch_first else y.transpose(0, 1)).pow(3).sum((1, 2))
        return losses if found is None else losses + found.flatten(1).pow(3).sum(1)

    assert_exact_in_every_way(model, draw(model, inputs), run)


def draw_inputs(count: int = 1):
    return [torch.randn(B, T, E, dtype=torch.float64) for _ in range(count)]


def encoder(**options):
    layer = nn.TransformerEncoderLayer(E, HEADS, 8, 0.0, **options)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(E), enable_nested_tensor=False)


def decoder(**options):
    layer = nn.TransformerDecoderLayer(E, HEADS, 8, 0.0, **options)
    return nn.TransformerDecoder(layer, 2, nn.LayerNorm(E))


MODELS = {
    "encoder": (encoder, lambda model, x, _: model(x)),
    "decoder": (decoder, lambda model, x, y: model(x, y, tgt_mask=NOT_ALLOWED, tgt_is_causal=True)),
    "both": (
        lambda **options: nn.Transformer(E, HEADS, 1, 1, 8, 0.0, **options),
        lambda model, x, y: model(y, x),
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize(
    ("kind", "batch_first", "norm_first", "training"),
    one_in(3, MODELS, (True, False), (True, False), (True, False)),
)
def test_transformers_are_exact(kind, batch_first, norm_first, training, way) -> None:
    build, call = MODELS[kind]
    model = build(batch_first=batch_first, norm_first=norm_first).double().train(training)

    def run(x, y):
        if not batch_first:
            return call(model, x.transpose(0, 1), y.transpose(0, 1)).pow(3).sum((0, 2))
        return call(model, x, y).pow(3).sum((1, 2))

    assert_exact(way, model, draw_inputs(2), run, tolerance=1e-10)


@pytest.mark.parametrize("frozen", ["out_proj", "in_proj", "in_proj_weight"])
def test_attention_that_is_frozen_in_part_used_twice_and_checkpointed_is_exact(frozen, way) -> None:
    model = nn.MultiheadAttention(E, HEADS).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))

    def run(x):
        x = x.transpose(0, 1)
        x = checkpoint(model, x, x, x, use_reentrant=False)[0]
        return model(x, x, x)[0].pow(3).sum((0, 2))

    assert_exact(way, model, draw_inputs(), run, tolerance=1e-10)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_subclass_may_call_attention_by_super(batch_first) -> None:
    model = SelfAttention(E, HEADS, batch_first=batch_first).double()

    def run(x):
        y = model(x if batch_first else x.transpose(0, 1))
        return (y if batch_first else y.transpose(0, 1)).pow(3).sum((1, 2))

    assert_exact(BookKeeping, model, draw_inputs(), run)


def test_random_numbers_are_drawn_as_without_clipping() -> None:
    for batch_first in (True, False):
        model = nn.TransformerEncoderLayer(E, HEADS, 8, 0.5, batch_first=batch_first)
        x = torch.randn(B, T, E)
        torch.manual_seed(1)
        plain = model(x)
        BookKeeping(model, 1.0)
        torch.manual_seed(1)
        assert torch.allclose(model(x), plain, atol=1e-6)


def test_a_batch_without_samples_leaves_nothing() -> None:
    model = encoder(batch_first=True)
    clipping = BookKeeping(model, 1.0)
    y = model(torch.zeros(0, T, E), src_key_padding_mask=torch.zeros(0, T, dtype=torch.bool))
    clipping.backward(y.sum((1, 2)))
    assert y.shape == (0, T, E)
    assert is_clear(model)


def test_a_setting_that_changes_is_followed() -> None:
    model = nn.TransformerEncoderLayer(E, HEADS, 8, 0.0).double()

    def make(model, bound):
        model.self_attn.batch_first = True
        clipping = BookKeeping(model, bound)
        model.self_attn.batch_first = False
        return clipping

    run = lambda x: model(x.transpose(0, 1)).pow(3).sum((0, 2))  # noqa: E731
    assert_exact(make, model, draw_inputs(), run, tolerance=1e-10)


class OtherLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


X = torch.zeros(B, T, E)


@pytest.mark.parametrize(
    ("inputs", "options", "what"),
    [
        ((X[0],) * 3, {}, "attention gets no batch"),
        ((X, X[:1], X[:1]), {}, "batches of other lengths"),
        ((X,) * 3, {"attn_mask": torch.zeros(B, T, S)}, r"attn_mask has shape \(4, 4, 4\)"),
        ((X,) * 3, {"key_padding_mask": torch.zeros(1, S)}, r"key_padding_mask has shape \(1, 4\)"),
        ((X,) * 3, {"attn_mask": NOT_ALLOWED.byte()}, "bool or floating point"),
        ((X,) * 3, {"is_causal": True}, "is_causal needs attn_mask"),
        ((torch.nested.nested_tensor([*X]),) * 3, {}, "a nested tensor; pad it"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_inputs_without_samples_are_refused(inputs, options, what) -> None:
    model = nn.MultiheadAttention(E, HEADS, batch_first=True)
    BookKeeping(model, 1.0)
    with pytest.raises((ValueError, UnsupportedError), match=what):
        model(*inputs, **options)


def test_another_projection_of_the_output_is_refused() -> None:
    model = nn.MultiheadAttention(E, HEADS, batch_first=True)
    model.out_proj = OtherLinear(E, E)
    with pytest.raises(UnsupportedError, match="out_proj alone, and that is a OtherLinear"):
        BookKeeping(model, 1.0)
