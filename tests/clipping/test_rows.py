"""Several rows for each sample: pairs, negatives, augmentations; exact where the graph proves it.

B samples, N rows of each, T tokens, D width. No batch is verified here unless a test says so.
"""

import pytest
import torch
from small_models import (
    EVERY,
    Composed,
    Scale,
    assert_exact,
    assert_exact_by_layer,
    assert_excluded,
    gradients,
    is_clear,
)
from torch import nn
from torch.nn import functional

from dpprof.private import UnsupportedError, linear_cross_entropy
from dpprof.private.errors import BatchAxisError

B, N, T, D = 4, 3, 2, 5


def make_model() -> nn.Module:
    """Make a model that returns what samples, tokens and 3 outputs have: (R, T, 3)."""
    torch.manual_seed(1)
    layers = nn.Linear(D, 6), nn.Tanh(), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def rows_of(m, x):
    """One number for each row, of (B, N, T, D), one sample's rows after another's."""
    return m(x.flatten(0, 1)).square().mean((1, 2))


def pairs_of(m, x):
    """All first rows, and then all second ones: what each returns, (2B, T, 3)."""
    return m(torch.cat([x[:, 0], x[:, 1]]))


def prefer(scores):
    chosen, rejected = scores.chunk(2)
    return -functional.logsigmoid(chosen - rejected)


def draw(samples: int = B):
    return torch.randn(samples, N, T, D, dtype=torch.float64)


def prefer_by_logits(m, x):
    chosen, rejected = pairs_of(m, x).chunk(2)
    return prefer(torch.cat([y.log_softmax(-1)[..., 0].sum(-1) for y in (chosen, rejected)]))


def by_triplets(m, x):
    y, n = m(torch.cat(x.unbind(1))).flatten(1), len(x)
    return functional.triplet_margin_loss(y[:n], y[n : 2 * n], y[2 * n :], reduction="none")


def by_negatives(m, x):
    anchors, others = m(x[:, 0]).flatten(1), m(x[:, 1:].flatten(0, 1)).flatten(1)
    others = functional.normalize(others, dim=1).view(len(x), N - 1, -1)
    scores = torch.einsum("bd,bkd->bk", functional.normalize(anchors, dim=1), others)
    labels = torch.zeros(len(x), dtype=torch.long)
    return functional.cross_entropy(scores / 0.1, labels, reduction="none")


def by_repeated_anchors(m, x):
    anchors, others = m(x[:, 0]).flatten(1), m(x[:, 1:].flatten(0, 1)).flatten(1)
    distances = functional.pairwise_distance(anchors.repeat_interleave(N - 1, 0), others)
    return distances.view(len(x), -1).amin(1)


def by_anchor_and_blocks(m, x):
    y, n = m(torch.cat([x[:, 0], x[:, 1:].flatten(0, 1)])).square().mean((1, 2)), len(x)
    return y[:n] + y[n:].view(n, -1).mean(1)


def weighted(m, x):
    losses, weights = rows_of(m, x), x.flatten(0, 1).abs().sum((1, 2))
    return (losses * weights).view(-1, N).sum(1) / weights.view(-1, N).sum(1)


def masked(m, x):
    losses, mask = m(x.flatten(0, 1)).square().mean(2), x.flatten(0, 1)[..., 0] > -1
    means = (losses * mask).sum(1) / mask.sum(1).clamp(min=1)
    return means.view(-1, N).mean(1)


def labelled(m, x):
    logits, labels = m(x.flatten(0, 1)).flatten(0, 1), x.flatten(0, 2)[:, 0].gt(0).long()
    return functional.cross_entropy(logits, labels, reduction="none").view(len(x), -1).mean(1)


def by_loop(m, x):
    return torch.stack([part.mean() for part in rows_of(m, x).split(N)])


def by_slices(m, x):
    y = rows_of(m, x)
    return torch.stack([y[i * N : (i + 1) * N].max() for i in range(len(x))])


def by_index(m, x):
    y, first = rows_of(m, x), torch.arange(len(x)) * N
    return (y[first] - 2 * y[first + 1]).square()


def by_index_add(m, x):
    of_rows = torch.arange(len(x)).repeat_interleave(N)
    return torch.zeros(len(x), dtype=x.dtype).index_add(0, of_rows, rows_of(m, x))


def by_last_token(m, x):
    y = m(x.flatten(0, 1))
    y = y[torch.arange(len(y)), torch.full((len(y),), T - 1)]
    return y.square().sum(1).view(-1, N).mean(1)


def by_products(m, x):
    first, second = pairs_of(m, x).flatten(1).chunk(2)
    return (first @ second.t()).diagonal().square()


def by_steps(m, x):
    y = m(x[:, :2].flatten(0, 1)).square().mean((1, 2))
    return (y[::2] - 2 * y[1::2]).square()


def by_narrow(m, x):
    y, n = pairs_of(m, x).mean((1, 2)), len(x)
    return (y.narrow(0, 0, n) - 2 * y.narrow(0, n, n)).square()


def the_best(m, x):
    y = rows_of(m, x).view(-1, N)
    return y.gather(1, y.argmax(1, keepdim=True))[:, 0]


def by_softmax(m, x):
    y = rows_of(m, x).view(-1, N)
    return (y.softmax(1) * y).sum(1)


EXACT = {
    "a mean over rows": lambda m, x: rows_of(m, x).view(-1, N).mean(1),
    "rows after samples": lambda m, x: (
        m(x.transpose(0, 1).flatten(0, 1)).square().mean((1, 2)).view(N, -1).amax(0)
    ),
    "three axes": lambda m, x: (
        m(x.permute(2, 0, 1, 3).flatten(0, 2)).square().sum(1).view(T, -1, N).mean((0, 2))
    ),
    "logsumexp": lambda m, x: rows_of(m, x).view(-1, N).logsumexp(1),
    "prod": lambda m, x: rows_of(m, x).unflatten(0, (-1, N)).prod(1),
    "std": lambda m, x: rows_of(m, x).view(-1, N).std(1),
    "norm": lambda m, x: m(x.flatten(0, 1)).flatten(1).view(len(x), -1).norm(dim=1),
    "the best": the_best,
    "the best two": lambda m, x: rows_of(m, x).view(-1, N).topk(2, 1).values.sum(1),
    "softmax over rows": by_softmax,
    "pairs": lambda m, x: prefer(pairs_of(m, x).square().mean((1, 2))),
    "pairs by logits": prefer_by_logits,
    "pairs, one after the other": by_steps,
    "pairs, narrowed": by_narrow,
    "pairs, two calls": lambda m, x: (m(x[:, 0]) - 2 * m(x[:, 1])).square().mean((1, 2)),
    "pairs, two calls joined": lambda m, x: (
        torch.cat([m(x[:, i]).mean((1, 2)) for i in (0, 1)]).view(2, -1).square().sum(0)
    ),
    "pairs by products": by_products,
    "triplets": by_triplets,
    "negatives": by_negatives,
    "anchors that are repeated": by_repeated_anchors,
    "anchors, then negatives": by_anchor_and_blocks,
    "a call for each": lambda m, x: torch.stack(
        [m(x[:, i]).square().mean((1, 2)) for i in range(N)], 1
    ).prod(1),
    "weighted": weighted,
    "masked": masked,
    "labelled": labelled,
    "a loop": by_loop,
    "slices": by_slices,
    "an index": by_index,
    "added at an index": by_index_add,
    "the last token": by_last_token,
    "differences": lambda m, x: (
        functional.pad(m(x.flatten(0, 1)).flatten(1).view(-1, N, 6), (0, 0, 1, 0))
        .diff(dim=1)
        .square()
        .sum((1, 2))
    ),
}


@pytest.mark.parametrize("samples", [B, N, 2, 1])
@pytest.mark.parametrize("form", EXACT)
def test_it_is_exact(form, samples, way) -> None:
    model = make_model()
    assert_exact(way, model, (draw(samples),), lambda x: EXACT[form](model, x))


@pytest.mark.parametrize(
    "form", ["a mean over rows", "rows after samples", "pairs", "anchors, then negatives"]
)
def test_each_layer_is_clipped_exactly(form) -> None:
    model = make_model()
    assert_exact_by_layer(model, (draw(),), lambda x: EXACT[form](model, x), bound=0.1)


def transposed(layer):
    return Composed(lambda m, x: m.layer(x.transpose(1, 2)).transpose(1, 2), layer=layer)


LAYERS = {
    "no rule": lambda: Scale(3),
    "a table of positions": lambda: Composed(
        lambda m, x: x + m.table(torch.arange(T)), table=nn.Embedding(T, 3)
    ),
    "convolution": lambda: transposed(nn.Conv1d(3, 3, 2, padding=1)),
    "group norm": lambda: transposed(nn.GroupNorm(1, 3)),
    "attention": lambda: Composed(
        lambda m, x: m.attention(x, x, x)[0],
        attention=nn.MultiheadAttention(3, 1, batch_first=True),
    ),
    "recurrent": lambda: Composed(lambda m, x: m.gru(x)[0], gru=nn.GRU(3, 3, batch_first=True)),
    "a scale outside of layers": lambda: Composed(
        lambda m, x: m.inner(x) * m.scale, inner=nn.Linear(3, 3), scale=torch.randn(T, 3)
    ),
    "complex": lambda: Composed(
        lambda m, x: torch.fft.irfft(m.weight(torch.fft.rfft(x, dim=1)), n=x.shape[1], dim=1),
        weight=nn.Linear(3, 3, bias=False, dtype=torch.complex128),
    ),
}


@pytest.mark.parametrize("form", ["a mean over rows", "rows after samples", "pairs by logits"])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_kind_of_layer_is_exact(layer, form, way) -> None:
    model = make_model().append(LAYERS[layer]().double())
    model.extend([nn.Tanh(), nn.Linear(3, 3).double()])
    assert_exact(way, model, (draw(),), lambda x: EXACT[form](model, x), bound=0.1)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_pairs_through_a_head_without_logits_are_exact(tied, keep, way) -> None:
    """As in preference training, where nothing keeps the logits."""
    table, body, head = nn.Embedding(7, D), nn.Linear(D, D), nn.Linear(D, 7, bias=not tied)
    if tied:
        head.weight = table.weight
    model = nn.ModuleList([table, body, head]).double()
    ids = torch.randint(7, (B, 2, T + 1))

    def losses_of(ids):
        both = torch.cat([ids[:, 0], ids[:, 1]])
        hidden = body(table(both[:, :-1])).tanh()
        return prefer(-linear_cross_entropy(hidden, head, both[:, 1:], keep=keep).sum(1))

    assert_exact(way, model, (ids,), losses_of, bound=0.2)


def name_owners(sizes):
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


RAGGED = {
    "parts": lambda y, sizes: torch.stack([part.sum() for part in y.split(sizes)]),
    "index add": lambda y, sizes: y.new_zeros(len(sizes)).index_add(0, name_owners(sizes), y),
    "scatter add": lambda y, sizes: (
        y.new_zeros(len(sizes), 2)
        .scatter_add(0, name_owners(sizes)[:, None].expand(-1, 2), y[:, None].expand(-1, 2))
        .mean(1)
    ),
    "masks": lambda y, sizes: torch.stack(
        [y[name_owners(sizes) == sample].sum() for sample in range(len(sizes))]
    ),
    "padded": lambda y, sizes: (
        y.new_zeros(len(sizes), max(sizes))
        .index_put((torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).nonzero().unbind(1), y)
        .sum(1)
    ),
}


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
@pytest.mark.parametrize("where", ["", "inner", "inner.0", "both"])
def test_rows_through_modules_with_backward_hooks_are_exact(where, register, way) -> None:
    def run(m, x):  # "both" gets and returns rows one after another, and in blocks
        first, second = m.both(x[:, :2].flatten(0, 1), torch.cat([*x.unbind(1)]))
        first, second = m.inner(first).square(), m.inner(second).tanh()
        return first.view(-1, 2 * T * 3).sum(1) + second.view(N, -1, T * 3).sum((0, 2))

    both = Composed(lambda m, a, b: (m.layer(a).tanh(), b * 2), layer=nn.Linear(D, D).double())
    model, seen = Composed(run, both=both, inner=make_model()), []
    getattr(model.get_submodule(where), register)(lambda module, *_: seen.append(module))
    assert_exact(way, model, (draw(),), model, first_batch="trusted")
    assert seen


@pytest.mark.parametrize("joined", RAGGED)
def test_another_number_of_rows_of_each_sample_is_exact(joined, way) -> None:
    """Also where there are as many rows as samples, after a batch that has one of each."""

    def ragged(m, x, sizes):
        return RAGGED[joined](rows_of(m, x), sizes)

    model = make_model()
    clipping = way(model, 0.05)
    for sizes in ([1, 1, 1], [2, 0, 1], [0, 1, 4], [3, 3, 3], [0, 0, 3]):
        x = torch.randn(sum(sizes), 1, T, D, dtype=torch.float64)
        clipping.backward(ragged(model, x, sizes))
        found = gradients(model)
        model.zero_grad()
        samples = []
        with clipping.disabled():
            for part in x.split(sizes):
                ragged(model, part, [len(part)]).sum().backward()
                samples.append(gradients(model))
                model.zero_grad()
        factors = [min(1.0, 0.05 / (float(one.norm()) + 1e-6)) for one in samples]
        expected = sum(f * one for f, one in zip(factors, samples, strict=True))
        assert (found - expected).norm() <= 1e-9 * expected.norm()


class Unknown(torch.autograd.Function):
    """The identity, as far as anybody can see nothing."""

    forward = staticmethod(lambda _, x: x.clone())
    backward = staticmethod(lambda _, g: g)


def against(first, second):
    labels = torch.arange(len(first))
    return functional.cross_entropy(first @ second.t(), labels, reduction="none")


def change_in_place(y):
    y = y * 1
    y[0].mul_(2)
    return y


def shifted_pairs(m, x):
    y, n = pairs_of(m, x).mean((1, 2)), len(x)
    return (y[:n] - torch.cat([y[n + 1 :], y[n : n + 1]])).square()


def flipped_pairs(m, x):
    chosen, rejected = pairs_of(m, x).mean((1, 2)).chunk(2)
    return (chosen - rejected.flip(0)).square()


def with_the_first(m, x):
    y = rows_of(m, x)
    return y.view(-1, N).mean(1) + y[0]


def by_rows(change):
    return lambda m, x: change(rows_of(m, x)).view(-1, N).mean(1)


def by_outputs(change):
    """Of what the model returns for each row, changed."""
    outputs_of = lambda m, x: change(m(x.flatten(0, 1)).flatten(1))  # noqa: E731
    return lambda m, x: outputs_of(m, x).square().mean(1).view(-1, N).mean(1)


REFUSED = {
    "flip": (by_rows(lambda y: y.flip(0)), "Flip"),
    "roll": (by_rows(lambda y: y.roll(1, 0)), "Roll"),
    "a row later": (by_rows(lambda y: functional.pad(y[:-1], (1, 0))), "another order"),
    "roll by slices": (by_rows(lambda y: torch.cat([y[1:], y[:1]])), "another order"),
    "sort": (by_rows(lambda y: y.sort(0).values), "Sort"),
    "an index by data": (by_rows(lambda y: y[(-y).argsort()]), "an index picks"),
    "an index at random": (
        by_rows(lambda y: y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]),
        "an index picks",
    ),
    "cumsum": (by_rows(lambda y: y.cumsum(0)), "Cumsum"),
    "softmax": (by_rows(lambda y: y.softmax(0)), "Softmax"),
    "centred": (by_rows(lambda y: y - y.mean(0)), "Sub"),
    "the largest": (by_rows(lambda y: y / y.max()), "Div"),
    "batch statistics": (
        by_outputs(lambda y: functional.batch_norm(y, None, None, training=True)),
        "NativeBatchNorm",
    ),
    "a product over rows": (
        by_outputs(lambda y: torch.ones(len(y), len(y)).double() @ y),
        "Mm",
    ),
    "attention over rows": (
        by_outputs(lambda y: functional.scaled_dot_product_attention(*[y[None, None]] * 3)[0, 0]),
        "ScaledDotProduct",
    ),
    "negatives of others": (lambda m, x: against(*pairs_of(m, x).flatten(1).chunk(2)), "Mm"),
    "pairs of others": (flipped_pairs, "Flip"),
    "pairs of the next": (shifted_pairs, "another order"),
    "windows that overlap": (
        lambda m, x: rows_of(m, x).unfold(0, N, N - 1).mean(1)[: len(x)],
        "Unfold",
    ),
    "one of another sample": (with_the_first, "Add"),
    "code that is not known": (by_rows(Unknown.apply), "Unknown"),
    "a view in place": (by_rows(change_in_place), "changes a view in place"),
    "code in place": (
        by_rows(lambda y: y.clone().index_fill_(0, torch.tensor([0]), 0.0).flip(0)),
        "Flip",
    ),
}


@pytest.mark.parametrize("first_batch", ["verified", "trusted"])
@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("form", REFUSED)
def test_what_the_graph_does_not_prove_is_refused_by_name(form, way, first_batch) -> None:
    model, x = make_model(), draw()
    losses_of, message = REFUSED[form]
    clipping = way(model, 0.1, first_batch=first_batch)
    for _ in range(2):
        with pytest.raises(BatchAxisError, match=r"saw (8|12) samples") as found:
            clipping.backward(losses_of(model, x))
        assert message in str(found.value)
        assert is_clear(model)
    clipping.backward(EXACT["a mean over rows"](model, x))  # the next batch


@pytest.mark.parametrize("none", [torch.zeros(0, dtype=torch.long), torch.zeros(B).bool()])
def test_an_expert_that_gets_no_rows_is_refused_by_name(none, way) -> None:
    model, x = make_model(), draw()[:, 0]
    clipping = way(model, 0.1)
    hidden = model[:4](x)
    chosen = model[4](hidden[none])
    losses = model[4](hidden).index_add(0, none.nonzero()[:, 0], chosen).square().mean((1, 2))
    with pytest.raises(BatchAxisError, match=r"4 saw 0 samples, .* in as_one="):
        clipping.backward(losses)


def test_as_many_rows_as_samples_in_another_order_are_refused_later_too(way) -> None:
    """An index by data keeps the order of the first batch, and not of the second."""
    model = make_model()
    clipping = way(model, 1.0)

    def losses_of(x):
        y = model(x[:, 0]).square().mean((1, 2))
        return y[x[:, 0, 0, 0].argsort()]

    x = torch.randn(B, 1, T, D, dtype=torch.float64)
    x[:, 0, 0, 0] = torch.arange(B)
    clipping.backward(losses_of(x))
    model.zero_grad()
    with pytest.raises(BatchAxisError, match="an index picks"):
        clipping.backward(losses_of(x.flip(0)))
    assert is_clear(model)


def test_a_layer_without_a_rule_that_mixes_rows_of_pairs_is_refused(way) -> None:
    centred = Composed(lambda m, x: (x - x.mean(0)) * m.weight, weight=torch.ones(3).double())
    model = make_model().append(centred)
    with pytest.raises((UnsupportedError, RuntimeError), match=r"gave another output|depends on"):
        way(model, 1.0).backward(prefer(pairs_of(model, draw()).square().mean((1, 2))))
    assert is_clear(model)


def test_a_sample_that_is_not_finite_is_excluded_with_all_its_rows(way) -> None:
    model, x = make_model(), draw()
    x[1, 1] = torch.inf
    assert_excluded(way, model, (x,), lambda x: EXACT["rows after samples"](model, x), at=1)
