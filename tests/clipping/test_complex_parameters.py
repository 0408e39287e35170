"""Complex parameters: two real ones for each number, in gradients, norms and noise.

The reference is a loop over samples by ordinary autograd.
"""

import copy
from functools import partial

import pytest
import torch
from factory import make_experiment
from small_models import EVERY, FLAT, Conv1D, assert_exact, assert_exact_by_layer, one_by_one
from torch import Tensor, nn

from dpprof.experiments.config import registry
from dpprof.private import check
from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.linear_cross_entropy import linear_cross_entropy
from dpprof.private.noise.optimizer import NoisyOptimizer

B, D = 5, 4
C = 0.5
TOLERANCES = {torch.complex64: 1e-5, torch.complex128: 1e-9}


class Fourier(nn.Module):
    """Filters frequencies, as Fourier neural operators do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(3, 5, D, dtype=dtype))
        self.out = nn.Linear(5 * 6, 2, dtype=dtype.to_real())

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.fft.rfft(x)[..., :D]
        return self.out(
            torch.fft.irfft(torch.einsum("bcf,cof->bof", kept, self.filters), 6).flatten(1)
        )

    @staticmethod
    def draw(dtype: torch.dtype) -> Tensor:
        return torch.randn(B, 3, 6, dtype=dtype.to_real())


class Around(nn.Module):
    """A complex linear layer, and a parameter beside it that enters for all samples."""

    def __init__(self, enter, dtype: torch.dtype, own: torch.dtype | None = None) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(D, dtype=own or dtype))
        self.linear = nn.Linear(D, 3, dtype=dtype)
        self.enter = enter

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.enter(x, self.own))


class Lookup(nn.Module):
    """A table, whose gradient PyTorch computes for an index but not for ``Embedding``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(7, D, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.weight[ids] if self.is_plain else self.table(ids)

    is_plain = False


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(D, D, dtype=dtype) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + self.first(x.conj()))


class Cell(nn.Module):
    """A recurrent cell over the tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for x_t in x.unbind(1):
            state = self.cell(x_t, state)
        return state


class BesideReal(nn.Module):
    """A layer without a rule that returns a complex tensor beside a real one."""

    class Polar(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.radius, self.angle = (nn.Parameter(torch.randn(D, dtype=dtype)) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.polar(self.radius.abs() + 0 * x, x * self.angle), x * self.radius

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.polar = self.Polar(dtype.to_real())
        self.out = nn.Linear(D, 2, dtype=dtype.to_real())

    def forward(self, x: Tensor) -> Tensor:
        z, y = self.polar(x)
        return torch.cat([torch.view_as_real(z + 1j).flatten(1), self.out(y)], dim=1)


class Number(nn.Module):
    """A parameter of one number."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.randn((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number


def complex_of(*shape: int):
    return lambda dtype: torch.randn(shape, dtype=dtype)


def real_of(*shape: int):
    return lambda dtype: torch.randn(shape, dtype=dtype.to_real())


MODELS = {
    "Fourier layer": (Fourier, Fourier.draw),
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
    "tied": (Tied, complex_of(B, 3, D)),
    "convolution": (lambda dtype: nn.Conv1d(2, 3, 3, dtype=dtype), complex_of(B, 2, 8)),
    "groups": (lambda dtype: nn.Conv2d(2, D, 3, groups=2, dtype=dtype), complex_of(B, 2, 5, 5)),
    "transposed": (lambda dtype: nn.ConvTranspose1d(2, 3, 3, dtype=dtype), complex_of(B, 2, 6)),
    "RMS norm": (lambda dtype: nn.RMSNorm(D, dtype=dtype), complex_of(B, 3, D)),
    "cell": (Cell, complex_of(B, 3, D)),
    "a number": (Number, real_of(B, D)),
    "complex beside real": (BesideReal, real_of(B, D)),
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
@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_and_norms_are_those_of_a_loop_over_samples(kind, way, dtype) -> None:
    torch.manual_seed(1)
    build, draw = MODELS[kind]
    compare(way, build(dtype), draw(dtype), TOLERANCES[dtype])


@pytest.mark.parametrize("own", [torch.float64, torch.complex128])
@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_enters_for_all_samples_may_be_complex_or_meet_complex_numbers(
    entry, way, own
) -> None:
    torch.manual_seed(2)
    model = Around(ENTRIES[entry], torch.complex128, own)
    compare(way, model, torch.randn(B, D, dtype=torch.complex128), 1e-9)


@pytest.mark.parametrize("way", FLAT)
def test_a_complex_table_has_the_gradient_of_an_index(way) -> None:
    torch.manual_seed(3)
    model, ids = Lookup(torch.complex128), torch.randint(7, (B, 6))
    model.is_plain = True
    expected = one_by_one(partial(losses_of, model), model, (ids,), C)
    model.is_plain = False
    assert_exact(way, model, (ids,), partial(losses_of, model), expected=expected)


def test_each_layer_has_a_bound_of_its_own() -> None:
    torch.manual_seed(4)
    dtype = torch.complex128
    model = nn.Sequential(nn.Linear(D, 3, dtype=dtype), nn.Linear(3, 2, dtype=dtype))
    batch = (torch.randn(B, D, dtype=dtype),)
    assert len(assert_exact_by_layer(model, batch, partial(losses_of, model), bound=C).groups) == 2


@pytest.mark.parametrize("way", EVERY)
def test_a_parameter_in_half_precision_has_a_sum_in_single_precision(way) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.randn(D, dtype=torch.complex64).to(torch.complex32))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.own.to(torch.complex64)

    torch.manual_seed(5)
    model = Small()
    clipping = way(model, C)
    clipping.backward(losses_of(model, torch.randn(B, D)))
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
        optimizer.clipping.backward(losses_of(model, torch.ones(B, D, dtype=torch.complex64)))
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = train()
    step(model, optimizer)
    saved = {name: one.clone() for name, one in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    again, resumed = train()
    again.load_state_dict(saved)
    resumed.load_state_dict(state, exact=True)
    step(model, optimizer)
    step(again, resumed)
    assert model.weight.is_complex()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_check_passes_with_noise_of_both_parts(dtype) -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(D, 30, dtype=dtype), nn.Linear(30, 3, dtype=dtype))
    optimizer = NoisyOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        BookKeeping(model, C),
        noise_multiplier=1.0,
        expected_batch_size=B,
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
