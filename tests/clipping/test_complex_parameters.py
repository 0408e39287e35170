"""Complex parameters: two real ones for each number, in gradients, norms and noise."""

import copy
from functools import partial

import pytest
import torch
from factory import make_experiment
from small_models import (
    EVERY,
    Composed,
    Conv1D,
    assert_exact,
    assert_exact_by_layer,
    one_by_one,
    private,
    take_step,
)
from torch import Tensor, nn

from dpprof.experiments.config import registry
from dpprof.private import (
    BookKeeping,
    NoisyOptimizer,
    UnsupportedError,
    check,
    linear_cross_entropy,
)

B, D = 5, 4
C = 0.5
TOLERANCES = {torch.complex64: 1e-5, torch.complex128: 1e-9}


def filter_frequencies(m: nn.Module, x: Tensor) -> Tensor:
    """Filter frequencies, as Fourier neural operators do."""
    kept = torch.fft.rfft(x)[..., :D]
    filtered = torch.einsum("bcf,cof->bof", kept, m.filters)
    return m.out(torch.fft.irfft(filtered, 6).flatten(1))


def make_fourier(dtype: torch.dtype) -> nn.Module:
    filters = torch.randn(3, 5, D, dtype=dtype)
    out = nn.Linear(5 * 6, 2, dtype=dtype.to_real())
    return Composed(filter_frequencies, filters=filters, out=out)


def make_around(enter, dtype: torch.dtype, own: torch.dtype) -> nn.Module:
    """A complex linear layer, and a parameter beside it that enters for all samples."""
    return Composed(
        lambda m, x: m.linear(enter(x, m.own)),
        own=torch.randn(D, dtype=own),
        linear=nn.Linear(D, 3, dtype=dtype),
    )


def make_tied(dtype: torch.dtype) -> nn.Module:
    first, second = (nn.Linear(D, D, dtype=dtype) for _ in range(2))
    second.weight = first.weight
    run = lambda m, x: m.second(m.first(x) + m.first(x.conj()))  # noqa: E731
    return Composed(run, first=first, second=second)


def run_cell(m: nn.Module, x: Tensor) -> Tensor:
    state = None
    for x_t in x.unbind(1):
        state = m.cell(x_t, state)
    return state


def make_beside_real(dtype: torch.dtype) -> nn.Module:
    """A layer without a rule that returns a complex tensor beside a real one."""

    def turn(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.polar(m.radius.abs() + 0 * x, x * m.angle), x * m.radius

    def join(m: nn.Module, x: Tensor) -> Tensor:
        z, y = m.polar(x)
        return torch.cat([torch.view_as_real(z + 1j).flatten(1), m.out(y)], dim=1)

    radius, angle = (torch.randn(D, dtype=dtype.to_real()) for _ in range(2))
    out = nn.Linear(D, 2, dtype=dtype.to_real())
    return Composed(join, polar=Composed(turn, radius=radius, angle=angle), out=out)


def complex_of(*shape: int):
    return lambda dtype: torch.randn(shape, dtype=dtype)


def real_of(*shape: int):
    return lambda dtype: torch.randn(shape, dtype=dtype.to_real())


MODELS = {
    "Fourier layer": (make_fourier, real_of(B, 3, 6)),
    "linear": (lambda dtype: nn.Linear(D, 3, dtype=dtype), complex_of(B, D)),
    "linear over tokens": (lambda dtype: nn.Linear(D, 3, dtype=dtype), complex_of(B, 20, D)),
    "no bias": (lambda dtype: nn.Linear(D, 3, bias=False, dtype=dtype), complex_of(B, D)),
    "GPT-2's linear layer": (lambda dtype: Conv1D(3, D).to(dtype), complex_of(B, 4, D)),
    "two layers": (
        lambda dtype: nn.Sequential(
            nn.Linear(D, 3, dtype=dtype), nn.Tanh(), nn.Linear(3, 2, dtype=dtype)
        ),
        complex_of(B, D),
    ),
    "tied": (make_tied, complex_of(B, 3, D)),
    "convolution": (lambda dtype: nn.Conv1d(2, 3, 3, dtype=dtype), complex_of(B, 2, 8)),
    "groups": (lambda dtype: nn.Conv2d(2, D, 3, groups=2, dtype=dtype), complex_of(B, 2, 5, 5)),
    "transposed": (lambda dtype: nn.ConvTranspose1d(2, 3, 3, dtype=dtype), complex_of(B, 2, 6)),
    "RMS norm": (lambda dtype: nn.RMSNorm(D, dtype=dtype), complex_of(B, 3, D)),
    "cell": (
        lambda dtype: Composed(run_cell, cell=nn.GRUCell(D, 3, dtype=dtype)),
        complex_of(B, 3, D),
    ),
    "a number": (
        lambda dtype: Composed(lambda m, x: x * m.number, number=torch.randn((), dtype=dtype)),
        real_of(B, D),
    ),
    "complex beside real": (make_beside_real, real_of(B, D)),
}
ENTRIES = {
    "product": lambda x, own: x * own,
    "sum": lambda x, own: x + own,
    "difference": lambda x, own: torch.sub(x, own, alpha=2),
    "over tokens": lambda x, own: (x[:, None] + own[None, None] * 1j).sum(1),
    "exponential": lambda x, own: x * own.exp(),
    "conjugate": lambda x, own: x * own.conj(),
    "real part": lambda x, own: x + own.real,
    "absolute value": lambda x, own: x * own.abs(),
}


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).abs().square().flatten(1).sum(1)


def compare(way, model: nn.Module, x: Tensor, tolerance: float) -> None:
    clipping = assert_exact(
        way, model, (x,), partial(losses_of, model), bound=C, tolerance=tolerance
    )
    assert (clipping.sample_norms > C).any()
    for parameter in model.parameters():
        assert parameter.grad.dtype == parameter.dtype


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_and_norms_are_those_of_a_loop_over_samples(kind, way, dtype) -> None:
    torch.manual_seed(1)
    build, draw = MODELS[kind]
    compare(way, build(dtype), draw(dtype), TOLERANCES[dtype])


@pytest.mark.parametrize("own", [torch.float64, torch.complex128])
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_enters_for_all_samples_may_be_complex_or_meet_complex_numbers(
    entry, way, own
) -> None:
    torch.manual_seed(2)
    model = make_around(ENTRIES[entry], torch.complex128, own)
    compare(way, model, torch.randn(B, D, dtype=torch.complex128), 1e-9)


def test_a_complex_table_has_the_gradient_of_an_index(way) -> None:
    """PyTorch computes it for an index but not for ``Embedding``."""
    torch.manual_seed(3)
    model, ids = nn.Embedding(7, D, dtype=torch.complex128), torch.randint(7, (B, 6))
    plain = Composed(lambda m, ids: m.table.weight[ids], table=model)
    expected = one_by_one(partial(losses_of, plain), model, (ids,), C)
    assert_exact(way, model, (ids,), partial(losses_of, model), expected=expected)


def test_each_layer_has_a_bound_of_its_own() -> None:
    torch.manual_seed(4)
    dtype = torch.complex128
    model = nn.Sequential(nn.Linear(D, 3, dtype=dtype), nn.Linear(3, 2, dtype=dtype))
    batch = (torch.randn(B, D, dtype=dtype),)
    assert len(assert_exact_by_layer(model, batch, partial(losses_of, model), bound=C).groups) == 2


@pytest.mark.parametrize("way", EVERY)
def test_a_parameter_in_half_precision_has_a_sum_in_single_precision(way) -> None:
    torch.manual_seed(5)
    own = torch.randn(D, dtype=torch.complex64).to(torch.complex32)
    model = Composed(lambda m, x: x * m.own.to(torch.complex64), own=own)
    way(model, C).backward(losses_of(model, torch.randn(B, D)))
    assert model.own.grad.dtype == torch.complex64
    assert 0 < float(torch.view_as_real(model.own.grad).norm()) <= B * C


def test_a_step_and_its_state_keep_complex_parameters() -> None:
    def train() -> tuple[nn.Module, NoisyOptimizer]:
        torch.manual_seed(6)
        model = nn.Linear(D, 3, dtype=torch.complex64)
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        options = {"noise_multiplier": 1.0, "expected_batch_size": B}
        source = torch.Generator().manual_seed(7)
        return model, NoisyOptimizer(adam, BookKeeping(model, C), generator=source, **options)

    def step(model: nn.Module, optimizer: NoisyOptimizer) -> None:
        take_step(optimizer, losses_of(model, torch.ones(B, D, dtype=torch.complex64)))

    model, optimizer = train()
    step(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(exact=True)))
    again, resumed = train()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1], exact=True)
    step(model, optimizer)
    step(again, resumed)
    assert model.weight.is_complex()
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_check_passes_with_noise_of_both_parts(dtype) -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(D, 30, dtype=dtype), nn.Linear(30, 3, dtype=dtype))
    optimizer = private(
        BookKeeping(model, C), model, lr=0.1, noise_multiplier=1.0, expected_batch_size=B
    )
    found = check(model, losses_of, (torch.randn(B, D, dtype=dtype),), optimizer)
    numbers = sum(2 * one.numel() for one in model.parameters())
    assert f"noise of the right scale, by {numbers} elements" in found.checked


def test_recurrent_layers_with_complex_parameters_are_refused_when_a_clipping_is_made() -> None:
    with pytest.raises(UnsupportedError, match="RNN has complex parameters"):
        BookKeeping(nn.RNN(D, 3, dtype=torch.complex64), C)


LAYERS = {
    "linear": (lambda: nn.Linear(D, 3), (2, D)),
    "convolution": (lambda: nn.Conv1d(D, 3, 1), (2, D, 5)),
    "layer norm": (lambda: nn.LayerNorm(D), (2, D)),
    "RMS norm": (lambda: nn.RMSNorm(D), (2, D)),
    "group norm": (lambda: nn.GroupNorm(2, D), (2, D)),
    "recurrent": (lambda: nn.LSTM(D, 3, batch_first=True), (2, 3, D)),
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_real_numbers_refuses_others(kind, dtype) -> None:
    build, shape = LAYERS[kind]
    layer = build()
    BookKeeping(layer, C)
    with pytest.raises(ValueError, match=f"got an input of {dtype}"):
        layer(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize(("of_head", "of_hidden"), [(8, 4), (4, 8)])
def test_a_head_of_complex_numbers_is_refused(of_head, of_hidden) -> None:
    dtypes = {4: torch.float32, 8: torch.complex64}
    head = nn.Linear(D, 7, dtype=dtypes[of_head])
    BookKeeping(head, C)
    hidden, labels = torch.ones(2, 3, D, dtype=dtypes[of_hidden]), torch.zeros(2, 3).long()
    with pytest.raises(ValueError, match=r"takes real numbers, .* is torch\.complex64"):
        linear_cross_entropy(hidden, head, labels)


def test_autocast_leaves_complex_numbers_alone() -> None:
    torch.manual_seed(9)
    model = nn.Linear(D, 3, dtype=torch.complex64)
    x = torch.randn(B, D, dtype=torch.complex64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(x)
        BookKeeping(model, C)
        assert torch.equal(model(x), plain)


@pytest.mark.parametrize("name", ["opacus-hooks", "opacus-ghost"])
def test_methods_of_opacus_refuse_complex_parameters(name) -> None:
    method, experiment = registry.load("methods", name), make_experiment(method=name)
    with pytest.raises(UnsupportedError, match="weight is complex, and Opacus's noise"):
        method(nn.Linear(D, 3, dtype=torch.complex64), experiment)
