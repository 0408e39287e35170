"""Losses that contain a gradient of the model: exact, or refused by what they contain."""

import functools

import pytest
import torch
from small_models import (
    EVERY,
    FLAT,
    Composed,
    Scale,
    assert_exact,
    assert_excluded,
    is_clear,
    one_by_one,
    squares,
)
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.private import PerLayerClipping, UnsupportedError, linear_cross_entropy

B, D = 4, 4


def run_tokens(m, x):
    """Norms of every kind over tokens, and a scale outside of layers."""
    y = m.norm(m.first(x.unflatten(1, (2, 2))).tanh()).tanh() * m.own
    return m.last(m.wide(m.rms(y).sigmoid()).tanh()).sum(1)


def tokens():
    layers = {"first": nn.Linear(2, 4), "norm": nn.LayerNorm(4), "rms": nn.RMSNorm(4)}
    layers |= {"wide": nn.LayerNorm((2, 4)), "last": nn.Linear(4, 1)}
    return Composed(run_tokens, **layers, own=torch.randn(4))


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.Softplus(),
        nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(72, 1),
    )


def odd_convolutions():
    """Such as skip places, or give more than they read."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)),
        nn.Conv1d(1, 4, 1, stride=2),
        nn.Softplus(),
        nn.Conv1d(4, 4, 2, groups=2, padding=1, padding_mode="circular"),
        nn.Tanh(),
        nn.ConvTranspose1d(4, 2, 2, dilation=3, output_padding=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 1),
    )


def perceptron(*between):
    return nn.Sequential(
        nn.Linear(D, 8), nn.Tanh(), *between, nn.Linear(8, 6), nn.Softplus(), nn.Linear(6, 1)
    )


def frozen(layer):
    return layer.eval().requires_grad_(requires_grad=False)


MODELS = {
    "perceptron": perceptron,
    "norm": lambda: perceptron(nn.LayerNorm(8)),
    "tokens": tokens,
    "convolutions": convolutions,
    "odd convolutions": odd_convolutions,
    "through frozen layers": lambda: perceptron(
        frozen(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.PReLU()))
    ),
}


def differentiate(y, x):
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return g


def penalty(m, x):
    x = x.detach().requires_grad_()
    return (differentiate(m(x), x).norm(dim=1) - 1) ** 2


def critic(m, x):
    """Of WGAN-GP: several calls, and a penalty between."""
    between = ((x + x.tanh()) / 2).requires_grad_()
    g = differentiate(m(between), between)
    return m(x)[:, 0] - m(x.tanh())[:, 0] + 10 * (g.norm(dim=1) - 1) ** 2


def laplacian(m, x):
    """Of a physics-informed loss: third derivatives in backward."""
    x = x.detach().requires_grad_()
    y = m(x)
    g = differentiate(y, x)
    second = [differentiate(g[:, at], x)[:, at] for at in range(x.shape[1])]
    return (sum(second) + y[:, 0].sin()).square()


def adversarial(m, x):
    """A gradient that is a number."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(m(x).square().sum(), x)
    return m(x + 0.1 * g.sign()).square().sum(1)


def of_outputs(m, x):
    """A gradient with respect to what a layer returned."""
    hidden = m[0](x)
    y = m[1:](hidden)
    return differentiate(y.square(), hidden).square().sum(1)


LOSSES = {"penalty": penalty, "critic": critic, "laplacian": laplacian, "numbers": adversarial}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def draw():
    return torch.randn(B, D, dtype=torch.float64)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_exact(name, loss, way) -> None:
    model = make(name)
    losses_of = functools.partial(LOSSES[loss], model)
    clipping = assert_exact(way, model, (draw(),), losses_of, tolerance=1e-8)

    model.zero_grad()
    clipping.backward(losses_of(draw()))
    assert clipping.batches == 2


@pytest.mark.parametrize("loss", LOSSES)
def test_instance_norms_are_exact(loss, way) -> None:
    """As group norms of one channel: PyTorch's third derivatives of instance norms are wrong."""
    around = nn.Unflatten(1, (2, 4)), nn.Flatten()
    twin = perceptron(around[0], nn.GroupNorm(2, 2), around[1]).double()
    model = perceptron(around[0], nn.InstanceNorm1d(2, affine=True), around[1]).double()
    model.load_state_dict(twin.state_dict())
    x = draw()
    expected = one_by_one(lambda x: LOSSES[loss](twin, x), twin, (x,))
    assert_exact(way, model, (x,), lambda x: LOSSES[loss](model, x), expected=expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_scale_of_losses_changes_nothing_in_float32(loss, way) -> None:
    """One of both uses of a weight has scaled inputs, the other scaled output gradients."""
    model = make("norm")
    x, losses_of = draw(), functools.partial(LOSSES[loss], model)
    options = {"expected": one_by_one(losses_of, model, (x,)), "loss_scale": 2.0**16}
    assert_exact(way, model.float(), (x.float(),), losses_of, tolerance=1e-3, **options)


def test_a_gradient_of_a_layers_output_is_exact(way) -> None:
    model = make("norm")
    assert_exact(way, model, (draw(),), lambda x: of_outputs(model, x))


@pytest.mark.parametrize("loss", LOSSES)
def test_layers_with_the_batch_second_are_exact(loss, way) -> None:
    layers = nn.Linear(2, 4), nn.LayerNorm(4), nn.Tanh(), nn.RMSNorm(4), nn.Linear(4, 1)
    model = Composed(
        lambda m, x: m.layers(x.unflatten(1, (2, 2)).transpose(0, 1)).sum(0),
        layers=nn.Sequential(*layers),
    ).double()
    losses_of = functools.partial(LOSSES[loss], model)
    assert_exact(way, model, (draw(),), losses_of, tolerance=1e-8, batch_second=["layers"])


def test_rows_of_several_samples_are_exact(way) -> None:
    """A penalty in each of two rows of a sample."""
    model, x = make("perceptron"), torch.randn(B, 2, D, dtype=torch.float64)
    join = lambda x: torch.cat([x[:, 0], x[:, 1]])  # noqa: E731
    assert_exact(way, model, (x,), lambda x: penalty(model, join(x)).view(2, -1).sum(0))


def test_a_gradient_that_mixes_samples_is_refused(way) -> None:
    model = make("perceptron")
    clipping = way(model, 0.5)
    x = draw().requires_grad_()
    g = differentiate(model(x).square() / model(x).mean(0), x)  # a plain quotient has none
    with pytest.raises(UnsupportedError, match="depends on"):
        clipping.backward(g.square().sum(1))
    assert is_clear(model)


def recur(m, x):
    """Of a first state, beside inputs without a gradient."""
    return m.rnn(torch.zeros(len(x), 3, 2, dtype=x.dtype), x[None])[0].mean(1)


def run_head(m, x):
    x = m.body(x) if hasattr(m, "body") else x
    return linear_cross_entropy(x[:, None], m.head, torch.ones(len(x), 1, dtype=torch.long))


REFUSED = {
    "complex": (
        lambda: Composed(
            lambda m, x: m.weight(x.to(torch.complex128)).abs(),
            weight=nn.Linear(D, D, dtype=torch.complex128),
        ),
        "goes through 0.weight, a Linear",
    ),
    "no rule": (lambda: Scale(D), "goes through 0, a Scale: clipping differentiates linear"),
    "recurrent": (
        lambda: Composed(recur, rnn=nn.GRU(2, D, batch_first=True)),
        "goes through 0.rnn, a GRU",
    ),
    "attention": (
        lambda: Composed(
            lambda m, x: m.attention(*[x[:, None]] * 3)[0][:, 0],
            attention=nn.MultiheadAttention(D, 1, batch_first=True),
        ),
        "goes through 0.attention, a MultiheadAttention",
    ),
    "head": (lambda: Composed(run_head, head=nn.Linear(D, 7)), "through linear_cross_entropy"),
    "frozen head": (
        lambda: Composed(
            run_head, body=nn.Linear(D, D), head=nn.Linear(D, 7).requires_grad_(requires_grad=False)
        ),
        "through linear_cross_entropy",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layers_are_refused_by_name(name, way) -> None:
    layer, message = REFUSED[name]
    model, x = nn.Sequential(layer()).double(), draw()
    clipping = way(model, 0.5)
    with pytest.raises(UnsupportedError, match=f"the loss contains a gradient.*{message}"):
        clipping.backward(penalty(model, x))
    assert is_clear(model)

    clipping.backward(squares(model, x))
    assert not is_clear(model)


def test_per_layer_clipping_refuses_it() -> None:
    model, x = make("perceptron"), draw()
    clipping = PerLayerClipping(model, 0.5)
    with pytest.raises(UnsupportedError, match=r"a Linear: per-layer clipping clips each use"):
        clipping.backward(penalty(model, x))
    assert is_clear(model)
    clipping.backward(adversarial(model, x))


def small():
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))


def by_parameters(m, x, **options):
    parameters = list(m.parameters())
    found = torch.autograd.grad(m(x).sum(), parameters, create_graph=True, **options)
    return torch.stack([g.square().sum() for g in found if g is not None]).sum().expand(len(x))


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("options", [{}, {"allow_unused": True}])
def test_a_gradient_of_parameters_is_refused_by_name(options, way) -> None:
    model, x = small(), torch.randn(B, D)
    clipping = way(model, 0.5)
    message = r"gradient of 2\.(weight|bias), which is clipped|a Linear: per-layer"
    with pytest.raises(UnsupportedError, match=message):
        clipping.backward(by_parameters(model, x, **options))
    with pytest.raises(UnsupportedError, match=r"gradient of 2\.(weight|bias), which is clipped"):
        torch.autograd.grad(model(x).sum(), [model[2].weight])
    assert is_clear(model)
    clipping.backward(squares(model, x))


def run_jvp(m, x):
    return torch.func.jvp(m, (x,), (x,))[1].sum(1)


def run_dual(m, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(m(forward_ad.make_dual(x, x))).tangent.sum(1)


TRANSFORMS = {
    "grad": lambda m, x: torch.func.vmap(torch.func.grad(lambda one: m(one).sum()))(x).sum(1),
    "vmap": lambda m, x: torch.func.vmap(m)(x).sum(1),
    "jvp": run_jvp,
    "jacrev": lambda m, x: torch.func.jacrev(lambda x: m(x).sum(0))(x).sum((0, 2)),
    "forward_ad": run_dual,
}


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_by_name(name, way) -> None:
    model, x = small(), torch.randn(B, D)
    clipping = way(model, 0.5)
    shown = {"jacrev": "grad"}.get(name, name)
    with pytest.raises(UnsupportedError, match=rf"Linear is clipped, .* inside of torch.*{shown}"):
        clipping.backward(TRANSFORMS[name](model, x))
    assert is_clear(model)
    clipping.backward(squares(model, x))


def test_a_gradient_inside_of_a_checkpoint_counts_once(way) -> None:
    """Backward runs the code again, and with it the gradient of inputs."""
    model, x = make("perceptron"), draw()

    def losses_of(x):
        def run(x):
            with torch.enable_grad():
                own = x.detach().requires_grad_()
                (g,) = torch.autograd.grad(model(own).sum(), own)
            return model(x + g).square().sum(1)

        return checkpoint(run, x, use_reentrant=False)

    assert_exact(way, model, (x,), losses_of)


def test_samples_that_are_not_finite_are_excluded(way) -> None:
    model, x = make("perceptron"), draw()
    x[0] = torch.nan
    assert_excluded(way, model, (x,), lambda x: penalty(model, x), at=0)


def test_a_tied_table_may_be_differentiated_again() -> None:
    table, head = nn.Embedding(7, D).double(), nn.Linear(D, 7, bias=False).double()
    head.weight = table.weight
    model = nn.ModuleList([table, head])
    ids = torch.randint(7, (B, 3))

    def losses_of(ids):
        embedded = table(ids)
        log_p = functional.log_softmax(head(embedded.tanh()), -1)[..., 0]
        return log_p.sum(1).square() + differentiate(log_p, embedded).square().sum((1, 2))

    for way in FLAT:
        assert_exact(way, model, (ids,), losses_of).remove()
        model.zero_grad()
