"""What enters a model once for all samples is clipped by sample, found from the graph alone."""

import functools

import pytest
import torch
import transformers
from products import one_in
from small_models import (
    FLAT,
    TINY,
    Composed,
    assert_exact,
    assert_exact_by_layer,
    assert_excluded,
    gradients,
    is_clear,
    squares,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, UnsupportedError

B, T, D, V = 4, 7, 8, 50

TEXT = TINY | {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
IMAGE = TEXT | {"image_size": 16, "patch_size": 8, "num_labels": 3}
TEXT |= {"vocab_size": V, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
    "vocab_size": V,
    "d_model": 16,
    "dropout": 0.0,
    "max_position_embeddings": 32,
}
T5 = {"vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
DISTIL = {"vocab_size": V, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
GPT2 = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
CONVNEXT = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "image_size": 32, "num_labels": 3}

MODELS = {
    "BertForMaskedLM": TEXT,
    "BertForSequenceClassification": TEXT,
    "AlbertForMaskedLM": TEXT | {"embedding_size": 8},
    "ElectraForSequenceClassification": TEXT | {"embedding_size": 8},
    "DistilBertForMaskedLM": DISTIL | {"dropout": 0.0, "attention_dropout": 0.0},
    "GPT2LMHeadModel": GPT2 | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "BartForConditionalGeneration": SEQ2SEQ,
    "T5ForConditionalGeneration": T5 | {"dropout_rate": 0.0},
    "CLIPTextModel": TEXT,
    "ViTForImageClassification": IMAGE,
    "DeiTForImageClassification": IMAGE,
    "BeitForImageClassification": IMAGE | {"layer_scale_init_value": 0.1, "drop_path_rate": 0.0},
    "Dinov2ForImageClassification": IMAGE,
    "CLIPVisionModel": IMAGE,
    "ConvNextForImageClassification": CONVNEXT,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**MODELS[name])).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def losses_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    if inputs.is_floating_point():
        named = {"pixel_values": inputs}
    else:
        named = {"input_ids": inputs}
        if model.config.is_encoder_decoder:
            named["decoder_input_ids"] = inputs
    found = model(**named)
    outputs = found.logits if hasattr(found, "logits") else found.pooler_output
    if outputs.shape[-1] == V:
        each = cross_entropy(outputs.flatten(0, 1), inputs.flatten(), reduction="none")
        return each.view(inputs.shape).mean(1)
    return outputs.logsumexp(1)


def choose(m, x):
    """Put one value where a mask holds, and another where a second one does not."""
    y = torch.where(x > 1, m.first, m.linear(x))
    return torch.where(x[..., :1] > -1, y, m.second.tanh())


@pytest.mark.parametrize("tokens", [T, B, 1])
def test_a_value_that_a_mask_chooses_is_exact(tokens, way) -> None:
    values = {"first": torch.randn(1, 1, D), "second": torch.randn(1, 1, D)}
    model = Composed(choose, linear=nn.Linear(D, D), **values).double()
    x = 2 * torch.randn(B, tokens, D).double()
    assert_exact(way, model, (x,), functools.partial(squares, model))


@pytest.mark.parametrize("tokens", [T, B])
def test_t5_is_exact_with_padding(tokens, way) -> None:
    model, ids = build("T5ForConditionalGeneration"), torch.randint(2, V, (B, tokens))
    mask = torch.arange(tokens) < torch.arange(B)[:, None] + 1

    def losses(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        named = {"attention_mask": mask, "decoder_attention_mask": mask}
        logits = model(input_ids=ids, decoder_input_ids=ids, **named).logits
        each = cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
        return (each.view(ids.shape) * mask).sum(1)

    assert_exact(way, model, (ids, mask), losses)


def has_no_tokens(name, tokens, _) -> bool:
    return tokens == B and "image_size" in MODELS[name]


@pytest.mark.parametrize(
    ("name", "tokens", "way"), one_in(2, MODELS, [T, B], FLAT, unless=has_no_tokens)
)
def test_models_are_exact_as_they_are(name, tokens, way) -> None:
    model = build(name)
    if side := getattr(model.config, "image_size", 0):
        inputs = torch.randn(B, 3, side, side).double()
    else:
        inputs = torch.randint(2, V, (B, tokens))
    run = functools.partial(losses_of, model)
    assert_exact(way, model, (inputs,), run, bound=0.5, tolerance=1e-8)


class Model(nn.Module):
    """Two layers, between which a parameter of the model enters."""

    def __init__(self, shape, enter) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.own, self.table = nn.Parameter(torch.randn(shape)), nn.Embedding(16, D)
        self.enter = enter
        self.double()

    def forward(self, x):
        return self.last(self.enter(self, self.first(x).tanh()).tanh())

    def losses(self, x):
        return self(x).square().sum((1, 2))


def positions(x, *shape):
    return torch.arange(x.shape[1]).view(*shape, -1)


FORMS = {
    "added": ((1, T, D), lambda m, x: x + m.own),
    "added, without a batch axis": ((D,), lambda m, x: x + m.own),
    "added by a factor": ((T, 1), lambda m, x: torch.add(x, m.own, alpha=0.3)),
    "subtracted": ((T, D), lambda m, x: torch.sub(x, m.own, alpha=2)),
    "subtracted from": ((T, D), lambda m, x: m.own - x),
    "multiplied": ((D,), lambda m, x: x * m.own),
    "multiplied, first": ((1, 1, D), lambda m, x: m.own * x),
    "one number": ((), lambda m, x: x * m.own),
    "expanded": ((1, 1, D), lambda m, x: torch.cat([m.own.expand(len(x), -1, -1), x], 1)),
    "expanded in two axes": ((1, 1, D), lambda m, x: x * m.own.expand(len(x), x.shape[1], -1)),
    "repeated": ((1, 2, D), lambda m, x: torch.cat([m.own.repeat(len(x), 1, 1), x], 1)),
    "moved": ((D, T), lambda m, x: x + m.own.t().unsqueeze(0).clone()),
    "looked up": ((9, D), lambda m, x: x + m.own[positions(x)]),
    "masked": ((1, T, D), lambda m, x: x + torch.where(torch.ones(T, 1) > 0, m.own, 0.0)),
    "scaled before, without a batch axis": ((T, D), lambda m, x: x + (m.own * 0.5 - 1) / 3),
    "scaled before": ((1, T, D), lambda m, x: x + m.own * 0.5),
    "after a softmax": ((T, T), lambda m, x: x + m.own.softmax(1).sum(1, keepdim=True)),
    "in a state space": ((D,), lambda m, x: torch.exp(-torch.exp(m.own) * x.abs())),
    "in place": ((1, T, D), lambda m, x: x.clone().add_(m.own)),
    "twice": ((T, D), lambda m, x: (x + m.own) * m.own[:, :1]),
    "with itself": ((1, T, D), lambda m, x: m.own * (x + m.own)),
    "in a part that is checkpointed": (
        (1, T, D),
        lambda m, x: checkpoint(lambda x: (x + m.own).tanh(), x, use_reentrant=False),
    ),
    "table, ids of one axis": ((D,), lambda m, x: x + m.own + m.table(positions(x))),
    "table, one row of ids": ((D,), lambda m, x: x + m.own + m.table(positions(x, 1))),
    "table, moved": ((D,), lambda m, x: x + m.own + m.table(positions(x)).unsqueeze(0)),
    # These make the model run as one layer.
    "as the base of a power": ((D,), lambda m, x: (m.own.abs() + 1) ** x),
    "one number as the base of a power": ((), lambda m, x: (m.own.abs() + 1) ** x),
    "one number, repeated": ((), lambda m, x: x * m.own.repeat(len(x))[:, None, None]),
    "in a product of matrices": ((D, D), lambda m, x: x @ m.own),
    "after another operator": ((T, D), lambda m, x: x + torch.atan2(m.own, m.own + 2)),
    "on another axis": ((T, 1, D), lambda m, x: (x.transpose(0, 1) + m.own).transpose(0, 1)),
}


@pytest.mark.parametrize(("form", "samples", "way"), one_in(3, FORMS, [1, B, T], FLAT))
def test_every_way_to_enter_is_exact(form, samples, way) -> None:
    model = Model(*FORMS[form])
    x = draw(samples)

    clipping = assert_exact(way, model, (x,), bound=0.5)
    assert model.own.grad is not None

    # Another batch adds to the first one's sum, as for every parameter.
    clipping.remove()
    before = gradients(model).clone()
    again = way(model, 0.5)
    model.zero_grad()
    for _ in range(2):
        again.backward(model.losses(x))
    torch.testing.assert_close(gradients(model), 2 * before, rtol=1e-9, atol=1e-12)


def test_samples_that_are_not_finite_and_empty_batches_contribute_nothing() -> None:
    model = Model(*FORMS["multiplied"])
    x = draw()
    clipping = BookKeeping(model, 0.5)
    clipping.backward(model.losses(x[:0]))
    assert not gradients(model).any()
    clipping.remove()
    x[-1] = torch.nan
    assert_excluded(BookKeeping, model, (x,), model.losses, at=B - 1)


def test_a_parameter_that_is_frozen_or_unused_gets_no_gradient() -> None:
    model = Model(*FORMS["added"])
    x = draw()
    clipping = BookKeeping(model, 0.5)
    losses = model.losses(x)
    model.own.requires_grad_(requires_grad=False)
    clipping.backward(losses)
    assert model.own.grad is None
    model.zero_grad()

    model.own.requires_grad_(requires_grad=True)
    model.enter = lambda _, x: x
    clipping.backward(model.losses(x))
    assert model.own.grad is None


def test_a_bias_that_a_layer_shares_with_its_module_is_clipped_once() -> None:
    model = Model((D,), lambda _, x: x)
    model.last.bias = model.own
    for enter in (model.enter, lambda m, x: x + m.own):
        model.enter = enter
        assert_exact(BookKeeping, model, (draw(),), bound=0.5).remove()
        model.zero_grad()


def mix(found):
    return (found @ torch.ones(D, D, dtype=found.dtype)).sum()


def look_up_in_two_ways(model, x):
    found = model.table(positions(x))
    return x * model.own + found + mix(found)


def draw(samples: int = B):
    return torch.randn(samples, T, D, dtype=torch.float64)


REFUSED = {
    "where reentrant checkpointing hides it": (
        (1, T, D),
        lambda m, x: checkpoint(lambda x: x + m.own, x, use_reentrant=True),
        "own was used outside of its layer",
    ),
    "multiplied in a part that is checkpointed": (
        (D,),
        lambda m, x: checkpoint(lambda x: x * m.own, x, use_reentrant=False),
        "own enters for all samples inside of a checkpoint, by an operator whose operands",
    ),
    "there and elsewhere": (
        (1, T, D),
        lambda m, x: checkpoint(lambda x: x + m.own, x + m.own, use_reentrant=True),
        "own was used (more than once|outside)",
    ),
    "a table, in two ways": (
        (D,),
        lambda m, x: x * m.own + m.table(positions(x)) + mix(m.table(positions(x))),
        "table saw 7 samples",
    ),
    "one lookup, in two ways": (
        (D,),
        look_up_in_two_ways,
        "table.weight is looked up once for all samples, and also goes into MmBackward0",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_found_is_refused_by_name(what, way) -> None:
    shape, enter, message = REFUSED[what]
    model = Model(shape, enter)
    with pytest.raises((UnsupportedError, RuntimeError, ValueError), match=message):
        way(model, 0.5).backward(model.losses(draw()))
    assert is_clear(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in MODELS if "ImageClassification" in one])
def test_models_are_exact_by_layer(name) -> None:
    model = build(name)
    side = model.config.image_size
    images = torch.randn(B, 3, side, side).double()
    run = functools.partial(losses_of, model)
    assert_exact_by_layer(model, (images,), run, bound=0.5, tolerance=1e-8)


@pytest.mark.parametrize("samples", [B, T])
@pytest.mark.parametrize("form", FORMS)
def test_per_layer_clipping_clips_a_parameter_beside_layers_by_itself(form, samples) -> None:
    model = Model(*FORMS[form])
    x = draw(samples)

    clipping = assert_exact_by_layer(model, (x,), model.losses, bound=0.01)
    layers = [own for own, _ in clipping.groups if any(one is model.own for one in own)]
    assert len(layers) == 1
    assert len(layers[0]) in (1, len(list(model.parameters())))  # where the model runs as one layer


def test_an_axis_that_becomes_as_long_as_the_batch_is_looked_at_again() -> None:
    """A bias of three heads is expanded to heads, and then added to every sample."""
    heads = 3
    model = Model(
        (1, T, D),
        lambda m, x: (x[:, None] + m.own.expand(heads, -1, -1).unsqueeze(0)).mean(1),
    )
    clipping = BookKeeping(model, 0.5)
    x = draw()
    for samples in (4, 2, 4):
        clipping.backward(model.losses(x[:samples]))
        model.zero_grad()
    assert clipping.first_batch_verified

    with pytest.raises(UnsupportedError, match="mixes samples, or another axis comes first"):
        clipping.backward(model.losses(x[:heads]))
    clipping.backward(model.losses(x))
