"""Tensors that are not dense numbers in memory of their own are exact, or refused by name."""

import pytest
import torch
from small_models import Composed, assert_exact, squares
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.nn.parameter import UninitializedParameter

from dpprof.private import BookKeeping, FlashClipping, UnsupportedError

D = 4


class Doubling(Tensor):
    """A tensor whose class changes what functions do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(nn.Parameter):
    """A parameter of a class that changes nothing."""


def eye() -> Tensor:
    return torch.eye(D)


def ragged(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, D), torch.ones(3, D)], layout=layout)


UNUSUAL = {
    "COO": (lambda: eye().to_sparse(), "sparse_coo.; make it dense"),
    "CSR": (lambda: eye().to_sparse_csr(), "sparse_csr.; make it dense"),
    "CSC": (lambda: eye().to_sparse_csc(), "sparse_csc.; make it dense"),
    "blocks": (lambda: eye().to_sparse_bsr((2, 2)), "sparse_bsr.; make it dense"),
    "MKL-DNN": (lambda: eye().to_mkldnn(), "_mkldnn.; make it dense"),
    "nested": (lambda: ragged(torch.strided), "a nested tensor; pad it"),
    "jagged": (lambda: ragged(torch.jagged), "a nested tensor; pad it"),
    "meta": (lambda: torch.zeros(D, D, device="meta"), "on meta, without values"),
    "masked": (lambda: masked_tensor(eye(), eye() > 0), "a MaskedTensor"),
    "quantised": (
        lambda: torch.quantize_per_tensor(eye(), 0.1, 0, torch.qint8),
        r"quantised .torch.qint8.; make it real",
    ),
}
EIGHT_BITS = {
    f"float8 {dtype}": ((lambda dtype=dtype: eye().to(dtype)), f"{dtype}; keep it in bfloat16")
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
}
OF_PARAMETERS = {
    **{name: one for name, one in UNUSUAL.items() if name != "quantised"},  # which has no gradient
    **EIGHT_BITS,
    "expanded": (lambda: torch.zeros(1).expand(D), "expanded, or has elements that share"),
    "overlapping": (lambda: torch.zeros(9).as_strided((3, 3), (1, 1)), "elements that share"),
    "of another class": (lambda: torch.zeros(D).as_subclass(Doubling), "a Doubling, whose func"),
    "lazy": (UninitializedParameter, "not initialised; run the model on a batch"),
}


def beside() -> nn.Module:
    """A linear layer, beside which a parameter or buffer will be that is not used."""
    return Composed(lambda m, x: m.linear(x), linear=nn.Linear(D, 3))


def with_parameter(value: Tensor, *, trained: bool = True) -> nn.Module:
    model = beside()
    is_one = isinstance(value, nn.Parameter)
    model.own = value if is_one else nn.Parameter(value, requires_grad=trained)
    return model


def with_buffer(value: Tensor, *, persistent: bool = True) -> nn.Module:
    model = beside()
    model.register_buffer("own", value, persistent=persistent)
    return model


def clip(way, model: nn.Module, **options) -> BookKeeping | FlashClipping:
    clipping = way(model, 1.0, **options)
    clipping.backward(squares(model, torch.ones(2, D)))
    return clipping


@pytest.mark.parametrize("kind", OF_PARAMETERS)
def test_a_trained_parameter_is_refused_by_name_when_a_clipping_is_made(kind, way) -> None:
    make, sentence = OF_PARAMETERS[kind]
    model = with_parameter(make())
    with pytest.raises(UnsupportedError, match=f"own is trained and is .*{sentence}.*, or freeze"):
        way(model, 1.0)


@pytest.mark.parametrize("kind", [*UNUSUAL, *EIGHT_BITS])
def test_a_frozen_parameter_may_be_of_any_kind(kind) -> None:
    make, _ = {**UNUSUAL, **EIGHT_BITS}[kind]
    clip(BookKeeping, with_parameter(make(), trained=False))


ORDINARY = {
    "a class that changes nothing": lambda: Named(torch.zeros(D)),
    "every other number": lambda: torch.zeros(2 * D)[::2],
    "a slice, transposed": lambda: torch.zeros(D, 2 * D).t()[:2],
    "no elements": lambda: torch.zeros(0, D),
    "a conjugate": lambda: torch.randn(D, dtype=torch.complex64).conj(),
    "a negative": lambda: torch.randn(D, dtype=torch.complex64).conj().imag,
    "float16": lambda: torch.zeros(D, dtype=torch.float16),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_other_parameters_are_taken(kind) -> None:
    clip(BookKeeping, with_parameter(ORDINARY[kind]()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_strides_of_a_parameter_change_no_gradient(way, dtype) -> None:
    found = []
    for lies in (lambda x: x, lambda x: x.t().contiguous().t(), lambda x: x.repeat(1, 2)[:, :D]):
        torch.manual_seed(0)
        model = nn.Linear(D, 3, dtype=dtype)
        model.weight = nn.Parameter(lies(model.weight.detach()))
        clipping = way(model, 0.5)
        clipping.backward(model(torch.ones(2, D, dtype=dtype)).abs().square().sum(1))
        found.append(model.weight.grad)
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])


def test_a_parameter_that_becomes_float8_later_is_refused() -> None:
    model = nn.Linear(D, 3)
    clipping = BookKeeping(model, 1.0)
    losses = squares(model, torch.ones(2, D))
    model.weight.data = model.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match=r"weight is trained and is torch\.float8_e4m3fn"):
        clipping.backward(losses)


def product() -> nn.Module:
    """A layer without a rule."""
    return Composed(lambda m, x: x @ m.matrix, matrix=torch.randn(D, 3))


SPARSE = {
    "COO": Tensor.to_sparse,
    "CSR": Tensor.to_sparse_csr,
    "CSC": Tensor.to_sparse_csc,
    "blocks": lambda x: x.to_sparse_bsr((1, 2)),
    "hybrid": lambda x: x.to_sparse(1),
    "not coalesced": lambda x: x.to_sparse() / 2 + x.to_sparse() / 2,
}


@pytest.mark.parametrize("kind", SPARSE)
def test_a_linear_layer_takes_a_sparse_batch_as_the_dense_one(kind, way) -> None:
    model = nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(6, D, dtype=torch.float64).relu()

    def losses_of(given: Tensor) -> Tensor:
        # One by one the reference gets the dense samples.
        return squares(model, SPARSE[kind](given) if len(given) > 1 else given)

    assert_exact(way, model, (x,), losses_of)


@pytest.mark.parametrize("kind", [*UNUSUAL, *EIGHT_BITS])
@pytest.mark.parametrize("build", [product, lambda: nn.LayerNorm(D), lambda: nn.GroupNorm(2, D)])
def test_a_layer_refuses_other_inputs_by_name(build, kind) -> None:
    make, sentence = {**UNUSUAL, **EIGHT_BITS}[kind]
    layer = build()
    BookKeeping(layer, 1.0)
    match = f"{type(layer).__name__} got an input that is .*{sentence}.*, or freeze"
    with pytest.raises(UnsupportedError, match=match):
        layer(make())


@pytest.mark.parametrize("kind", ["nested", "jagged", "meta", "quantised", *EIGHT_BITS])
def test_a_linear_layer_refuses_other_inputs_by_name(kind) -> None:
    make, sentence = {**UNUSUAL, **EIGHT_BITS}[kind]
    layer = nn.Linear(D, 3)
    BookKeeping(layer, 1.0)
    with pytest.raises(UnsupportedError, match=f"Linear got an input that is .*{sentence}"):
        layer(make())


def test_evaluation_without_gradients_takes_nested_inputs() -> None:
    layer = nn.Linear(D, 3)
    plain = layer(ragged(torch.jagged))
    BookKeeping(layer, 1.0)
    with torch.no_grad():
        found = layer(ragged(torch.jagged))
    for one, other in zip(found.unbind(), plain.unbind(), strict=True):
        assert torch.equal(one, other)


LOSSES = {
    "sparse": (lambda losses: losses.to_sparse(), "losses are sparse"),
    "meta": (lambda losses: losses.to("meta"), "losses are on meta"),
    "masked": (lambda losses: masked_tensor(losses.detach(), losses > 0), "losses are a MaskedTe"),
    "complex": (lambda losses: losses * 1j, "must be float32 or float64, and are torch.complex64"),
    "float8": (lambda losses: losses.to(torch.float8_e4m3fn), "and are torch.float8_e4m3fn"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_of_other_kinds_are_refused(kind) -> None:
    make, sentence = LOSSES[kind]
    model = nn.Linear(D, 3)
    clipping = BookKeeping(model, 1.0)
    with pytest.raises(ValueError, match=sentence):
        clipping.backward(make(squares(model, torch.ones(2, D))))


THROUGH = {
    "sparse": lambda y: y.to_sparse().to_dense(),
    "CSR": lambda y: y.to_sparse_csr().to_dense(),
    "a sparse product": lambda y: torch.sparse.mm(
        torch.eye(3, dtype=y.dtype).to_sparse(), y.t()
    ).t(),
    "nested": lambda y: torch.nested.to_padded_tensor(
        torch.nested.as_nested_tensor(list(y[:, None])), 0.0
    ),
    "frequencies": lambda y: torch.fft.fft(y).abs(),
    "complex": lambda y: torch.complex(y, y * 2).conj().abs(),
}


@pytest.mark.parametrize("kind", THROUGH)
def test_activations_after_a_layer_may_be_of_any_kind(kind, way) -> None:
    model = nn.Linear(D, 3).double()
    x = torch.randn(6, D, dtype=torch.float64)
    assert_exact(way, model, (x,), lambda x: THROUGH[kind](model(x)).square().flatten(1).sum(1))


USES = {
    "gather": lambda own, x: torch.gather(own, 0, (x > 0).long() + 1, sparse_grad=True) * x,
    "embedding": lambda own, x: (
        nn.functional.embedding((x > 0).long(), own, sparse=True) * x[:, :1, None]
    ),
}


@pytest.mark.parametrize("kind", USES)
def test_sparse_gradients_of_parameters_are_summed_as_dense_ones(kind, way) -> None:
    """Those of a layer without a rule, whose parameter autograd gives a sparse gradient."""
    model = Composed(lambda m, x: USES[kind](m.own, x), own=torch.randn(D, D)).double()
    x = torch.randn(6, D, dtype=torch.float64)
    assert_exact(way, model, (x,), lambda x: squares(model, x), bound=0.5)
    assert model.own.grad.layout == torch.strided


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_buffer_that_cannot_be_compared_is_refused_unless_it_is_public(kind, persistent) -> None:
    make, sentence = UNUSUAL[kind]
    said = f"own must not change, .*{sentence}.*public_buffers"
    with pytest.raises(UnsupportedError, match=said):
        BookKeeping(with_buffer(make(), persistent=persistent), 1.0)
    clip(BookKeeping, with_buffer(make(), persistent=persistent), public_buffers=["own"])


BUFFERS = {
    "float8": (
        lambda: torch.zeros(D).to(torch.float8_e4m3fn),
        lambda x: x.view(torch.uint8).add_(1),
    ),
    "complex": (lambda: torch.zeros(D, dtype=torch.complex64), lambda x: x.add_(1j)),
    "half complex": (lambda: torch.zeros(D, dtype=torch.complex32), lambda x: x.real.add_(1)),
    "a conjugate": (lambda: torch.ones(D, dtype=torch.complex64).conj(), lambda x: x.mul_(1j)),
    "a negative": (lambda: torch.ones(D, dtype=torch.complex64).conj().imag, lambda x: x.add_(1)),
    "expanded": (lambda: torch.zeros(1).expand(D), lambda x: x[:1].add_(1)),
    "a number": (lambda: torch.tensor(3), lambda x: x.add_(1)),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_change_of_a_buffer_through_data_is_seen(kind) -> None:
    make, change = BUFFERS[kind]
    model = with_buffer(make())
    clipping = clip(BookKeeping, model)
    model.zero_grad()
    change(model.own.data)
    with pytest.raises(RuntimeError, match=r"own was changed through \.data"):
        clipping.backward(squares(model, torch.ones(2, D)))
