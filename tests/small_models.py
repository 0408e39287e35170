"""Models with one layer under test each, between an embedding and a loss.

Shape legend: B samples, T tokens, d width, V vocabulary.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.engine.flash_clipping import FlashClipping
from dpprof.private.engine.per_layer import PerLayerClipping
from dpprof.private.noise.optimizer import NoisyOptimizer

FLAT = [FlashClipping, BookKeeping]
EVERY = [*FLAT, PerLayerClipping]
NORMALISED = [functools.partial(way, stability=0.01) for way in FLAT]


def each_of(ways):
    """Make the fixture ``way`` of these ways to clip."""
    return pytest.fixture(params=ways, name="way")(lambda request: request.param)


TINY = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
"""Sizes of a model of transformers."""

STAGES = {"hf": "x", "model_type": "resnet", "depths": [1, 1], "hidden_sizes": [8, 16]}
STAGES |= {"embedding_size": 8, "layer_type": "bottleneck", "image_size": 32}
"""A ResNet of transformers, with stages in place of blocks."""

V = 6
"""So few ids that tokens repeat."""


class Conv1D(nn.Module):
    """GPT-2's linear layer, known by its module's and its own name."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


Conv1D.__module__ = "transformers.pytorch_utils"


class Scale(nn.Module):
    """A layer without a rule."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).tanh()


class Around(nn.Module):
    """A layer, and how it is called."""

    def __init__(self, layer: nn.Module, call) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


class Composed(nn.Module):
    """Layers and parameters by name, and how a function of them and the inputs runs."""

    def __init__(self, run, **parts) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if type(part) is Tensor else part)

    def forward(self, *inputs, **named):
        return self.run(self, *inputs, **named)


def four_axes(layer: nn.Module) -> Around:
    """Let a layer see (B, T, 1, d)."""
    return Around(layer, lambda layer, x: layer(x[:, :, None])[:, :, 0])


def two_axes(layer: nn.Module) -> Around:
    """Let a layer see (B, d)."""
    return Around(layer, lambda layer, x: layer(x.mean(1))[:, None])


def twice(layer: nn.Module) -> Around:
    """Use a layer twice."""
    return Around(layer, lambda layer, x: layer(layer(x).tanh()))


def over_channels(layer: nn.Module) -> Around:
    """Let a layer see (B, d, T)."""
    return Around(layer, lambda layer, x: layer(x.transpose(1, 2)).transpose(1, 2))


BODIES = {
    "linear": lambda d, p, bias: nn.Linear(d, p, bias=bias),
    "linear of 2 axes": lambda d, p, bias: two_axes(nn.Linear(d, p, bias=bias)),
    "linear of 4 axes": lambda d, p, bias: four_axes(nn.Linear(d, p, bias=bias)),
    "conv1d": lambda d, p, _: Conv1D(p, d),
    "layer norm": lambda d, _, bias: nn.LayerNorm(d, bias=bias),
    "convolution": lambda d, _, bias: over_channels(
        nn.Sequential(nn.Conv1d(d, d, 3, padding=1, bias=bias), nn.GroupNorm(1, d))
    ),
    "rms norm": lambda d, *_: nn.RMSNorm(d),
    "no rule": lambda d, *_: Scale(d),
    "used twice": lambda d, _, bias: twice(nn.Linear(d, d, bias=bias)),
    "norm used twice": lambda d, _, bias: twice(nn.LayerNorm(d, bias=bias)),
}
WITHOUT_BIAS = [kind for kind in BODIES if kind not in ("conv1d", "rms norm", "no rule")]
KINDS = [
    *itertools.product(BODIES, [True]),
    *itertools.product(WITHOUT_BIAS, [False]),
    ("tied", False),
    ("padding", False),
]


class Small(nn.Module):
    """Embedding, layer under test, and a head over V ids."""

    def __init__(self, kind: str, d: int, p: int, *, bias: bool, variant: str = "plain") -> None:
        super().__init__()
        self.variant = variant
        self.embedding = nn.Embedding(V, d, padding_idx=0 if kind == "padding" else None)
        self.positions = nn.Embedding(1000, d)
        build = BODIES.get(kind, BODIES["linear"])
        wide = kind.startswith("linear") or kind == "conv1d"
        self.body = build(d, p if wide else d, bias)
        self.head = nn.Linear(p if wide else d, V, bias=False)
        if kind == "tied":
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        if variant == "frozen":
            self.positions.requires_grad_(False)
            for name, parameter in self.body.named_parameters():
                parameter.requires_grad_("bias" in name)

    def forward(self, ids_BT: Tensor) -> Tensor:
        B, T = ids_BT.shape
        positions_BT = torch.arange(T).repeat(B, 1)
        x = self.embedding(ids_BT) + self.positions(positions_BT)
        if self.variant == "checkpoint":
            x = checkpoint(self.body, x, use_reentrant=False)
        elif self.variant == "reentrant checkpoint":
            x = checkpoint(self.body, x, use_reentrant=True)
        else:
            x = self.body(x)
        return self.head(x)

    def losses(self, ids_BT: Tensor, labels_BT: Tensor, weights_B: Tensor) -> Tensor:
        """Losses of the samples, weighted: a weight of 0 makes an all-zero gradient."""
        logits = self(ids_BT)
        labels = labels_BT[:, : logits.shape[1]]
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(labels.shape).mean(1) * weights_B


def draw(B: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ids, labels, and weights of which the last is 0 where there are several."""
    generator = torch.Generator().manual_seed(B * 10_000 + T)
    ids, labels = (torch.randint(V, (B, T), generator=generator) for _ in range(2))
    weights = torch.linspace(0.5, 3, B)
    if B > 1:
        weights[-1] = 0
    return ids, labels, weights


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    """Give new tensors another dtype inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def squares(model: nn.Module, *inputs: Tensor) -> Tensor:
    """Losses of samples: the squares of what a model makes of them, summed."""
    return model(*inputs).square().flatten(1).sum(1)


class Secure(torch.Generator):
    """As torchcsprng's, which has no state to give or to take."""

    def get_state(self):
        raise RuntimeError("not implemented")

    set_state = get_state


def sums_of(clipping) -> torch.Tensor:
    """Return the clipped sums that wait for noise; zeros where no sample has a gradient."""
    part = clipping.sums.part
    return torch.cat([part.get(p, torch.zeros_like(p)).flatten() for p in clipping.parameters])


def gradients(model: nn.Module) -> Tensor:
    """Join the gradients of a model's trained parameters, zero where there is none, in float64.

    A complex number counts as two.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    parts = [
        torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in parts
    ]
    return torch.cat([part.to_dense().flatten().double() for part in parts])


def is_clear(model: nn.Module) -> bool:
    """Tell whether no parameter has a gradient."""
    return all(p.grad is None for p in model.parameters())


def one_by_one(losses_of, model: nn.Module, batch: tuple[Tensor, ...], bound: float | None = None):
    """Norms and the clipped sum in float64, by ordinary autograd, a sample at a time.

    The bound is the median norm where it is None.
    """
    samples = []
    for sample in zip(*batch, strict=True):
        losses_of(*(part[None] for part in sample)).sum().backward()
        samples.append(gradients(model))
        model.zero_grad()
    norms = torch.stack([sample.norm() for sample in samples])
    bound = float(norms.median()) if bound is None else bound
    factors = (bound / (norms + 1e-6)).clamp(max=1)
    return norms, factors @ torch.stack(samples), bound


def assert_exact(
    way,
    model: nn.Module,
    batch,
    losses_of=None,
    *,
    bound=None,
    tolerance=1e-9,
    expected=None,
    **options,
):
    """Clip a batch as samples one at a time are clipped; returns the clipping.

    What is expected is what ``one_by_one`` returns, of the same model and losses where it is None.
    """
    losses_of = losses_of or model.losses
    norms, total, bound = expected or one_by_one(losses_of, model, batch, bound)
    clipping = way(model, bound, **options)
    clipping.backward(losses_of(*batch))
    assert (gradients(model) - total).norm() <= tolerance * total.norm()
    assert (clipping.sample_norms - norms).norm() <= tolerance * norms.norm()
    return clipping


def assert_exact_in_every_way(model: nn.Module, batch, losses_of, *, bound=None) -> None:
    """Clip a batch flatly and by layer; the losses stay what they were."""
    before = losses_of(*batch)
    for way in FLAT:
        clipping = assert_exact(way, model, batch, losses_of, bound=bound, tolerance=1e-10)
        assert torch.allclose(losses_of(*batch), before, rtol=1e-10)
        clipping.remove()
        model.zero_grad()
    assert_exact_by_layer(model, batch, losses_of, bound=bound or 0.3)


def assert_excluded(way, model: nn.Module, batch, losses_of, at: int) -> None:
    """A sample that is not finite adds nothing, and costs the others nothing."""
    others = [part[torch.arange(len(part)) != at] for part in batch]
    expected = one_by_one(losses_of, model, others, 0.1)[1]
    clipping = way(model, 0.1)
    clipping.backward(losses_of(*batch))
    assert clipping.nonfinite_samples == 1
    assert (gradients(model) - expected).norm() <= 1e-9 * expected.norm()


def assert_exact_by_layer(
    model: nn.Module, batch, losses_of, *, bound=1.0, tolerance=1e-9, **options
):
    """Clip each layer of a batch as those of samples one at a time are clipped."""
    clipping = PerLayerClipping(model, bound, **options)
    clipping.backward(losses_of(*batch))  # which also shows which modules run as one layer
    clipped = {p: p.grad for p in model.parameters() if p.grad is not None}
    model.zero_grad()
    expected = {p: torch.zeros_like(p) for p in clipped}
    for sample in zip(*batch, strict=True):
        with clipping.disabled():
            losses_of(*(part[None] for part in sample)).sum().backward()
        for every, own_bound in clipping.groups:
            layer = [p for p in every if p.grad is not None]
            if not layer:  # it was not used
                continue
            norm = torch.stack([p.grad.norm() for p in layer]).norm()
            for p in layer:
                expected[p] = expected[p] + p.grad * min(1, own_bound / (norm + 1e-6))
        model.zero_grad()
    assert sum(own_bound**2 for _, own_bound in clipping.groups) <= bound**2 * (1 + 1e-9)
    for p, total in expected.items():
        assert (clipped[p] - total).norm() <= tolerance * total.norm() + 1e-14
    return clipping


def build(kind: str = "layer norm", *, bias: bool = True, variant: str = "plain") -> Small:
    """Build a small model in float64, always with the same parameters."""
    torch.manual_seed(0)
    return Small(kind, 6, 9, bias=bias, variant=variant).double()


def batch(B: int = 4, T: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a batch for a model in float64."""
    ids, labels, weights = draw(B, T)
    return ids, labels, weights.double()


def private(clipping, model, lr: float = 1.0, **options) -> NoisyOptimizer:
    """Wrap SGD for noise; by default there is none."""
    options = {"noise_multiplier": 0.0, "expected_batch_size": 1} | options
    return NoisyOptimizer(torch.optim.SGD(model.parameters(), lr=lr), clipping, **options)


def take_step(optimizer, losses, *batch) -> None:
    """Clip losses, or what they are of a batch; step on it or its part, and clear gradients."""
    getattr(optimizer, "backward", optimizer.clipping.backward)(losses, *batch)
    optimizer.step()
    optimizer.zero_grad()
