"""Every kind of layer of torch.nn with parameters, and what models put between them.

Each has a function that builds a model, the losses of its samples and a batch, as
``dpprof.estimate`` takes it.

Shape legend: B samples, T steps, d width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from factory import make_experiment
from torch import Tensor, nn
from torch.nn import functional

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment

B, T, d, H = 16, 6, 8, 12
IMAGES = {1: (20,), 2: (10, 10), 3: (6, 6, 6)}
FEW = {"batch_size": B, "seq_len": 1, "target": "cpu"}


@contextmanager
def built_by(build: Callable[[Experiment], Any], **fields: Any) -> Iterator[Experiment]:
    """The experiment of a function that builds a model, B 16, on this machine's processor."""
    with registry.lent(build) as name:
        yield make_experiment(**{"model": name, **FEW, **fields})


def of(make: Callable[[], nn.Module], *shape: int, pick: Any = lambda y: y, ids: int = 0):
    """Build a module whose loss is the mean square of what it returns for each sample."""

    def build(experiment: Experiment) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
        model, size = make(), (experiment.batch_size, *shape)
        x = torch.randint(ids, size) if ids else torch.randn(size)
        return model, lambda x: pick(model(x)).square().flatten(1).mean(1), x

    return build


class Calls(nn.Module):
    """A layer, called by a function of it and of the input."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


class Fourier(nn.Module):
    """A Fourier layer: complex weights of the lowest modes of an image."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        weight = torch.randn(channels, channels, modes, modes, dtype=torch.cfloat)
        self.weight = nn.Parameter(weight / channels)

    def forward(self, x: Tensor) -> Tensor:
        of_x = torch.fft.rfft2(x)
        out, low = torch.zeros_like(of_x), (..., slice(self.modes), slice(self.modes))
        out[low] = torch.einsum("bihw,iohw->bohw", of_x[low], self.weight)
        return torch.fft.irfft2(out, s=x.shape[-2:])


def calling(layer: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor], *shape: int):
    return of(lambda: Calls(layer(), call), *shape)


def after(function: Callable[[Tensor], Tensor]):
    """A linear layer, then a function."""
    return calling(partial(nn.Linear, 32, 32), lambda layer, x: function(layer(x)), 10, 32)


def after_images(function: Callable[[Tensor], Tensor], axes: int = 2):
    def call(layer: Any, x: Tensor) -> Tensor:
        return function(layer(x))

    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    return calling(partial(conv, 4, 8, 1), call, 4, *IMAGES[axes])


def run_cells(cell: Any, x: Tensor) -> Tensor:
    state, outputs = None, []
    for step in x.unbind(1):
        state = cell(step, state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs, 1)


def attend(layer: nn.MultiheadAttention, x: Tensor, **options: Any) -> Tensor:
    keys, values = x[..., : layer.kdim], x[..., : layer.vdim]
    return layer(x, keys, values, **options)[0]


def spread(x: Tensor) -> list[Tensor]:
    return [x.unflatten(-1, (4, 8)).transpose(1, 2)] * 3


def _recurrent() -> Iterator[tuple[str, Any]]:
    ways: dict[str, dict[str, Any]] = {
        "": {},
        "-no-bias": {"bias": False},
        "-both": {"bidirectional": True},
        "-2": {"num_layers": 2},
        "-2-dropout": {"num_layers": 2, "dropout": 0.3},
        "-3-both-dropout": {"num_layers": 3, "dropout": 0.3, "bidirectional": True},
    }
    for layer in (nn.LSTM, nn.GRU, nn.RNN):
        name = layer.__name__
        for way, options in ways.items():
            make = partial(layer, d, H, batch_first=True, **options)
            yield name + way, of(make, T, d, pick=lambda y: y[0])
        steps_first = calling(
            partial(layer, d, H, 2, bidirectional=True),
            lambda layer, x: layer(x.transpose(0, 1))[0].transpose(0, 1),
            *(T, d),
        )
        yield f"{name}-steps-first", steps_first
        last = calling(
            partial(layer, d, H, batch_first=True),
            lambda layer, x: layer(x)[1][0].reshape(len(x), -1),
            *(T, d),
        )
        yield f"{name}-last-state", last
        behind = calling(
            lambda layer=layer: nn.ModuleList([nn.Linear(d, 70), layer(70, 64, batch_first=True)]),
            lambda layers, x: layers[1](layers[0](x))[0],
            *(T, d),
        )
        yield f"{name}-behind-linear", behind
        one = of(partial(layer, 1, 1, batch_first=True), T, 1, pick=lambda y: y[0])
        yield f"{name}-of-one", one
        cell = getattr(nn, f"{name}Cell")
        yield f"{name}Cell", calling(partial(cell, d, H), run_cells, T, d)
    for way, options in ways.items():
        make = partial(nn.LSTM, d, H, batch_first=True, proj_size=5, **options)
        yield f"LSTM-projected{way}", of(make, T, d, pick=lambda y: y[0])
    relu = {"nonlinearity": "relu", "batch_first": True}
    yield "RNN-relu", of(partial(nn.RNN, d, H, **relu), T, d, pick=lambda y: y[0])


def _of_images() -> Iterator[tuple[str, Any]]:
    convolutions: dict[str, dict[str, Any]] = {
        "": {"kernel_size": 3, "padding": 1},
        "-strided": {"kernel_size": 3, "stride": 2},
        "-dilated": {"kernel_size": 3, "dilation": 2, "bias": False},
        "-1": {"kernel_size": 1},
        "-groups": {"kernel_size": 3, "groups": 2},
        "-each": {"kernel_size": 3, "groups": 8},
    }
    for axes, sides in IMAGES.items():

        def named(kind: str, axes: int = axes) -> Any:
            return getattr(nn, f"{kind}{axes}d")

        def behind(layer: Callable[[], nn.Module], axes: int = axes) -> nn.Module:
            return nn.Sequential(getattr(nn, f"Conv{axes}d")(4, 8, 1), layer())

        for way, options in convolutions.items():
            make = partial(named("Conv"), 8, 16, **options)
            yield f"Conv{axes}d{way}", of(partial(behind, make), 4, *sides)
            if "-dil" not in way:
                make = partial(named("ConvTranspose"), 8, 16, **options)
                yield f"ConvTranspose{axes}d{way}", of(partial(behind, make), 4, *sides)
        circular = partial(named("Conv"), 4, 8, 3, padding=1, padding_mode="circular")
        yield f"Conv{axes}d-circular", of(circular, 4, *sides)
        for kind in ("BatchNorm", "InstanceNorm"):
            make = partial(named(kind), 8, affine=True)
            yield f"{kind}{axes}d", of(partial(behind, make), 4, *sides)
        yield f"GroupNorm-{axes}d", of(partial(behind, partial(nn.GroupNorm, 2, 8)), 4, *sides)
        for pool in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
            function = partial(getattr(functional, f"{pool}{axes}d"), kernel_size=2)
            if pool.startswith("adaptive"):
                function = partial(getattr(functional, f"{pool}{axes}d"), output_size=2)
            yield f"{pool}{axes}d", after_images(function, axes)
        twice = partial(functional.interpolate, scale_factor=2)
        yield f"nearest{axes}d", after_images(twice, axes)
        around = partial(functional.pad, pad=(1, 1) * axes, mode="replicate")
        yield f"replicate{axes}d", after_images(around, axes)


ACTIVATIONS = (
    *("ReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Sigmoid", "Tanh", "Softplus"),
    *("Softsign", "Hardswish", "Hardsigmoid", "Hardtanh", "Hardshrink", "Softshrink", "GLU"),
    *("Tanhshrink", "LogSigmoid", "LeakyReLU", "RReLU", "Dropout", "AlphaDropout"),
)
LOSSES = (
    *("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCEWithLogitsLoss", "SoftMarginLoss"),
    *("PoissonNLLLoss", "MultiLabelSoftMarginLoss"),
)


def _against_zeros(loss: str, x: Tensor) -> Tensor:
    return getattr(nn, loss)(reduction="none")(x, torch.zeros_like(x))


KINDS: dict[str, Callable[[Experiment], Any]] = {
    **dict(_recurrent()),
    **dict(_of_images()),
    "Linear": of(partial(nn.Linear, 32, 64), 32),
    "Linear-steps": of(partial(nn.Linear, 32, 64), 10, 32),
    "Bilinear": calling(partial(nn.Bilinear, 24, 24, 8), lambda layer, x: layer(x, x), 24),
    "BatchNorm1d-vectors": of(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)), 8),
    "LayerNorm": of(lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)), 10, 32),
    "RMSNorm": of(lambda: nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32)), 10, 32),
    "PReLU": of(lambda: nn.Sequential(nn.Linear(32, 32), nn.PReLU()), 32),
    "Embedding": of(partial(nn.Embedding, 50, 16), 12, ids=50),
    "Embedding-padding": of(partial(nn.Embedding, 50, 16, padding_idx=0), 12, ids=50),
    **{
        f"EmbeddingBag-{mode}": of(partial(nn.EmbeddingBag, 50, 16, mode=mode), 12, ids=50)
        for mode in ("sum", "mean", "max")
    },
    **{
        f"MultiheadAttention-{name}": calling(
            partial(nn.MultiheadAttention, 32, 4, batch_first=True, **options), call, 10, 32
        )
        for name, options, call in (
            ("weights", {}, attend),
            ("fused", {}, partial(attend, need_weights=False)),
            ("dropout", {"dropout": 0.1}, partial(attend, need_weights=False)),
            ("widths", {"kdim": 16, "vdim": 24}, attend),
            ("more", {"add_bias_kv": True, "add_zero_attn": True}, attend),
        )
    },
    "TransformerEncoderLayer": of(
        partial(nn.TransformerEncoderLayer, 32, 4, 64, batch_first=True), 10, 32
    ),
    "TransformerDecoderLayer": calling(
        partial(nn.TransformerDecoderLayer, 32, 4, 64, batch_first=True),
        lambda layer, x: layer(x, x),
        *(10, 32),
    ),
    "Transformer": calling(
        partial(nn.Transformer, 32, 4, 1, 1, 64, batch_first=True, dropout=0.0),
        lambda layer, x: layer(x, x),
        *(10, 32),
    ),
    "Fourier": of(partial(Fourier, 4, 8), 4, 32, 32),
    "fft": after(lambda x: torch.fft.fft(x).abs()),
    "hfft": after(lambda x: torch.fft.hfft(x.to(torch.cfloat))),
    "stft": calling(
        partial(nn.Linear, 32, 32),
        lambda layer, x: torch.stft(
            layer(x), 16, window=torch.hann_window(16), return_complex=True
        ).abs(),
        32,
    ),
    "weight-norm": of(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), 32),
    "spectral-norm": of(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)), 32),
    **{name: after(getattr(nn, name)()) for name in ACTIVATIONS},
    "Softmax": after(nn.Softmax(-1)),
    "Dropout2d": after_images(nn.Dropout2d()),
    "PixelShuffle": after_images(nn.PixelShuffle(2)),
    "Unfold": after_images(nn.Unfold(3)),
    "CosineSimilarity": after(lambda x: functional.cosine_similarity(x, x + 1, dim=-1)),
    "masked": after(lambda x: x * (x > 0)),
    "attention": after(lambda x: functional.scaled_dot_product_attention(*spread(x))),
    "attention-causal": after(
        lambda x: functional.scaled_dot_product_attention(*spread(x), is_causal=True)
    ),
    "attention-dropout": after(
        lambda x: functional.scaled_dot_product_attention(*spread(x), dropout_p=0.1)
    ),
    "attention-masked": after(
        lambda x: functional.scaled_dot_product_attention(
            *spread(x), attn_mask=torch.ones(10, 10, dtype=torch.bool).tril()
        )
    ),
    **{name: after(partial(_against_zeros, name)) for name in LOSSES},
    "svdvals": after(torch.linalg.svdvals),
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.13
    KINDS["LinearCrossEntropyLoss"] = calling(
        partial(nn.LinearCrossEntropyLoss, 32, 50, reduction="none"),
        lambda layer, x: layer(x, torch.zeros(len(x), dtype=torch.int64))[:, None],
        32,
    )
