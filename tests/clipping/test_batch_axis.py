"""Layers that get the batch on their second axis are clipped exactly, or refused."""

import pytest
import torch
from opacus.layers import DPMultiheadAttention, SequenceBias
from small_models import EVERY, Composed, Scale, assert_exact, assert_exact_by_layer, gradients
from torch import nn

from dpprof.private import BookKeeping, PerLayerClipping, UnsupportedError, linear_cross_entropy

B = T = 4  # of the same length: nothing may depend on lengths
D, V = 6, 5


class Model(nn.Module):
    """Every kind of layer that treats tokens alike, one without a rule, and code in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D)
        self.body = nn.Sequential(
            nn.Linear(D, D), nn.ReLU(inplace=True), nn.LayerNorm((2, 3)), nn.RMSNorm(3), Scale(3)
        )
        self.body[2].bias = None
        self.inner = nn.TransformerEncoderLayer(D, 2, 8, 0.0)
        self.head = nn.Linear(D, V)

    def forward(self, ids_BT):
        x_TBd = self.table(ids_BT.t())
        x_TBd = self.body[1](self.body[0](x_TBd)).unflatten(2, (2, 3))
        x_TBd = self.body[4](self.body[3](self.body[2](x_TBd))).flatten(2)
        return self.head(self.inner(x_TBd).transpose(0, 1))


def run(model):
    return lambda ids: model(ids).pow(3).sum((1, 2))


def draw():
    return (torch.randint(V, (B, T)),)


@pytest.mark.parametrize("way", EVERY)
def test_declared_modules_are_exact(way) -> None:
    model, names = Model().double(), ["table", "body"]
    if way is PerLayerClipping:
        assert_exact_by_layer(model, draw(), run(model), batch_second=names)
    else:
        assert_exact(way, model, draw(), run(model), tolerance=1e-10, batch_second=names)


@pytest.mark.parametrize("names", [[], ["table"], ["body"], ["table", "body", "head"], [""]])
def test_a_declaration_that_is_wrong_is_refused_on_the_first_batch(names) -> None:
    model = Model()
    clipping = BookKeeping(model, 1.0, batch_second=names)
    with pytest.raises(UnsupportedError, match="another axis"):
        clipping.backward(run(model)(*draw()))


@pytest.mark.parametrize("names", [[], [""]])
def test_samples_without_tokens_have_no_gradient(names, way) -> None:
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.LayerNorm(D), Scale(D))
    clipping = way(model, 1.0, batch_second=names)
    ids = torch.zeros((0, B) if names else (B, 0), dtype=torch.long)
    clipping.backward(model(ids).sum((0, 2) if names else (1, 2)))
    assert clipping.sample_norms.tolist() == [0.0] * B
    assert not gradients(model).any()


def test_another_length_is_refused_where_the_first_batch_is_trusted() -> None:
    model = Model()
    clipping = BookKeeping(model, 1.0, first_batch="trusted")
    told = r"is not proven to have rows of each sample \(samples lie on another of its axes"
    with pytest.raises(UnsupportedError, match=told):
        clipping.backward(run(model)(torch.zeros(3, T, dtype=torch.long)))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("inside", [False, True])
def test_opacus_attention_is_exact_both_ways_round(inside, batch_first, way) -> None:
    options = {} if inside else {"add_bias_kv": True, "add_zero_attn": True}
    model = DPMultiheadAttention(D, 2, batch_first=batch_first, **options)
    if inside:
        attention, model = model, nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=batch_first)
        model.self_attn = attention
    model = model.double()

    def losses_of(x):
        x = x if batch_first else x.transpose(0, 1)
        y = model(x) if inside else model(x, x, x)[0]
        return (y if batch_first else y.transpose(0, 1)).pow(3).sum((1, 2))

    assert_exact(way, model, draw_inputs(), losses_of, tolerance=1e-10)


def draw_inputs():
    return (torch.randn(B, T, D, dtype=torch.float64),)


def turned(layer):
    """Give a layer the batch first, within a module that has it second."""
    return Composed(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=layer)


@pytest.mark.parametrize("names", [[], ["linear1.0"]])
def test_a_setting_holds_for_layers_directly_in_a_module_and_others_are_declared(names) -> None:
    model = nn.TransformerEncoderLayer(D, 2, 8, 0.0)
    model.linear1 = nn.Sequential(model.linear1) if names else turned(model.linear1)
    model = model.double()
    losses_of = lambda x: model(x.transpose(0, 1)).pow(3).sum((0, 2))  # noqa: E731
    batch = draw_inputs()
    clipping = assert_exact(BookKeeping, model, batch, losses_of, batch_second=names)
    clipping.remove()
    model.zero_grad()
    clipping = BookKeeping(model, 1.0, batch_second=["linear1"] if not names else [])
    with pytest.raises(UnsupportedError, match="another axis"):
        clipping.backward(losses_of(*batch))


@pytest.mark.parametrize("names", [[], [""]])
def test_a_module_that_says_so_itself_needs_no_declaration_and_allows_it(names) -> None:
    model = SequenceBias(D).double()
    losses_of = lambda x: model(x.transpose(0, 1)).pow(3).sum((0, 2))  # noqa: E731
    assert_exact(BookKeeping, model, draw_inputs(), losses_of, batch_second=names)


def test_a_setting_that_changes_is_verified_again() -> None:
    model = nn.LSTM(D, D, batch_first=True)
    clipping = BookKeeping(model, 1.0)
    x = torch.randn(B, T, D)
    for batch_first in (True, False, True):
        model.batch_first = batch_first
        losses = model(x)[0].square().sum((1, 2))
        if batch_first:
            clipping.backward(losses)
            model.zero_grad()
        else:
            with pytest.raises(UnsupportedError, match=r"what LSTM computed|LSTM saw"):
                clipping.backward(losses)


@pytest.mark.parametrize(
    ("model", "names", "what"),
    [
        (Model(), ["tabel"], "'tabel', which is no module of the model; is it 'table'"),
        (Model(), ["inner.self_attn.out"], "is it 'inner.self_attn.out_proj' or"),
        (Model(), "table", "'t', which is no module"),
        (nn.Sequential(nn.LSTM(D, D, batch_first=True)), ["0"], "'0', which has batch_first=True"),
    ],
)
def test_a_name_that_means_nothing_is_refused(model, names, what) -> None:
    with pytest.raises(ValueError, match=what):
        BookKeeping(model, 1.0, batch_second=names)


def test_a_layer_of_two_modules_that_disagree_is_refused() -> None:
    shared = nn.Linear(D, D)
    model = nn.ModuleDict({"one": nn.Sequential(shared), "two": nn.Sequential(shared)})
    BookKeeping(model, 1.0, batch_second=["one"])
    with pytest.raises(UnsupportedError, match="Linear is shared by modules"):
        shared(torch.zeros(B, T, D))


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(D, D), (B, D)), (nn.LayerNorm((B, D)), (T, B, D))]
)
def test_an_input_without_a_second_axis_is_refused(layer, shape) -> None:
    model = nn.Sequential(layer)
    BookKeeping(model, 1.0, batch_second=["0"])
    with pytest.raises(ValueError, match="has no such axis"):
        model(torch.zeros(shape))


def test_a_head_with_its_loss_is_refused() -> None:
    head = nn.Linear(D, V)
    BookKeeping(nn.Sequential(head), 1.0, batch_second=["0"])
    with pytest.raises(UnsupportedError, match="gets more than its input"):
        linear_cross_entropy(torch.zeros(T, B, D), head, torch.zeros(T, B, dtype=torch.long))
