"""What docs/how-to/what-is-clipped.md says is exact is, and what it says is refused is."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from small_models import Conv1D, Scale, twice
from torch import nn
from torch.nn.utils.parametrizations import orthogonal
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from dpprof.private.contributions.sample_norms import BatchAxisError
from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.engine.flash_clipping import FlashClipping
from dpprof.private.errors import UnsupportedError
from dpprof.private.noise.optimizer import NoisyOptimizer

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "what-is-clipped.md"
TITLES = "Exact", "Refused"
B, T, D = 3, 4, 6


class Between(nn.Module):
    """Something between two linear layers; or in place of them, for ids."""

    def __init__(self, inside, run: Callable = lambda inside, x: inside(x)) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(D, D), inside, nn.Linear(D, D)
        self.run = run

    def forward(self, x):
        return self.last(self.run(self.inside, self.first(x)))


class Owner(Between):
    def __init__(self, inside) -> None:
        super().__init__(inside, lambda inside, x: inside(x + self.token))
        self.token = nn.Parameter(torch.randn(1, 1, D))


class Multiplier(Between):
    def __init__(self) -> None:
        super().__init__(nn.Linear(D, D))
        self.own = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        return super().forward(x @ self.own)


class HasGraph(nn.Identity):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(D).to_sparse())


class AwqLoraLinear(nn.Linear):
    """Stands for peft's adapter of a layer that AWQ quantised."""

    __module__ = "peft.tuners.lora.awq"

    def __init__(self) -> None:
        super().__init__(D, D)


def over_quantized(bits: int, **options) -> nn.Module:
    """A layer of bitsandbytes between two that are trained."""
    layers = pytest.importorskip("bitsandbytes").nn
    if bits == 4:
        layer = layers.Linear4bit(D, D, bias=False, quant_type="nf4")
    else:
        layer = layers.Linear8bitLt(D, D, **{"bias": False, "has_fp16_weights": False} | options)
    return Between(layer.to("cpu"))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, D), nn.Linear(D, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(ids_of(x)))


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class RandomScale(Scale):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


class Standardised(nn.Conv1d):
    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


class Inherits(nn.Linear):
    pass


class OtherRmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(D)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 0.5


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(2, D, D))

    def forward(self, x):
        tokens = x.view(-1, D)
        shares, chosen = nn.functional.linear(tokens, self.gate).softmax(1).max(1)
        y = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            places = (chosen == expert).nonzero()[:, 0]
            y.index_add_(0, places, tokens[places] @ self.up[expert])
        return (y * shares[:, None]).view(x.shape)


class Several(Scale):
    def forward(self, x):
        return {"y": (super().forward(x), len(x))}


class GetsLayer(Scale):
    def forward(self, x, layer):
        return layer(x) * self.weight


class Lends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ParameterDict({"a": nn.Parameter(torch.ones(D))})

    def forward(self, x):
        return x * self.held["a"]


def ids_of(x):
    return (x[..., 0].abs() * 10).long() % 5


def over_channels(inside, x):
    return inside(x.transpose(1, 2)).transpose(1, 2)


def attend(inside, x):
    return inside(x, x, x)[0]


def recur(inside, x):
    return inside(x)[0]


def recur_packed(inside, x):
    lengths = (x[:, :, 0] > 0).sum(1).clamp(min=1)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(inside(packed)[0], batch_first=True, total_length=T)[0]


def run_cell(inside, x):
    return inside(x[:, 0], inside(x[:, 1]))[0][:, None]


def time_first(inside, x):
    return inside(x.transpose(0, 1)).transpose(0, 1)


class NamedInside(Between):
    """Declares that ``inside`` has the batch on its second axis."""

    options = {"batch_second": ["inside"]}  # noqa: RUF012


def in_order_of_experts(inside, x):
    tokens = x.flatten(0, 1)
    order = tokens.sum(1).argsort()
    return tokens.index_add(0, order[2:], inside(tokens[order[2:]])).view(x.shape)


def looked_up(**options):
    return Between(nn.Embedding(5, D, **options), lambda inside, x: x + inside(ids_of(x)))


EXACT: dict[str, Callable[[], nn.Module]] = {
    "`Linear`": lambda: Between(nn.Linear(D, D)),
    "`Embedding`": lambda: looked_up(padding_idx=1),
    "`LayerNorm`": lambda: Between(nn.LayerNorm(D)),
    "`RMSNorm`": lambda: Between(nn.RMSNorm(D)),
    "RMS norm of another class": lambda: Between(OtherRmsNorm()),
    "subclass of `Embedding` that calls `super().forward`": lambda: Between(
        ScaledEmbedding(5, D), lambda inside, x: x + inside(ids_of(x))
    ),
    "`Conv1D` of GPT-2": lambda: Between(Conv1D(D, D)),
    "subclass that inherits `forward`": lambda: Between(Inherits(D, D)),
    "`Conv1d`": lambda: Between(nn.Conv1d(D, D, 3, padding=1), over_channels),
    "`ConvTranspose1d`": lambda: Between(nn.ConvTranspose1d(D, D, 3, padding=1), over_channels),
    "convolution that changes its weight in `forward`": lambda: Between(
        Standardised(D, D, 3, padding=1), over_channels
    ),
    "`InstanceNorm1d`": lambda: Between(nn.InstanceNorm1d(D, affine=True), over_channels),
    "`GroupNorm`": lambda: Between(nn.GroupNorm(2, D), over_channels),
    "`BatchNorm1d` that is frozen and in `eval()`": lambda: Between(
        nn.BatchNorm1d(T).requires_grad_(requires_grad=False).eval()
    ),
    "`PReLU`": lambda: Between(nn.PReLU()),
    "`Bilinear`": lambda: Between(nn.Bilinear(D, D, D), lambda inside, x: inside(x, x)),
    "positions looked up once for all samples": lambda: Between(
        nn.Embedding(T, D), lambda inside, x: x + inside(torch.arange(T))
    ),
    "parameter of a module that contains layers": lambda: Owner(nn.Linear(D, D)),
    "`ParameterDict` for another layer": lambda: Between(Lends()),
    "module that computes with its own parameters": lambda: Between(Multiplier()),
    "experts and their router": lambda: Between(Mixture()),
    "samples and tokens in one axis": lambda: Between(
        nn.Linear(D, D), lambda inside, x: inside(x.flatten(0, 1)).view(x.shape)
    ),
    "several rows for a sample": lambda: Between(
        nn.Linear(D, D),
        lambda inside, x: torch.stack(inside(torch.cat([x, x.tanh()])).chunk(2)).prod(0),
    ),
    "loss that contains a gradient of the model": lambda: Between(
        nn.Linear(D, D),
        lambda inside, x: torch.autograd.grad(inside(x).sin().sum(), x, create_graph=True)[0],
    ),
    "windows": lambda: Between(
        nn.Linear(D, D), lambda inside, x: inside(x.view(-1, 2, D)).view(x.shape)
    ),
    "layer without a rule that returns several tensors": lambda: Between(
        Several(D), lambda inside, x: inside(x)["y"][0]
    ),
    "layer that is used twice": lambda: Between(twice(nn.Linear(D, D))),
    "tied embedding and head": Tied,
    "non-reentrant checkpointing": lambda: Between(
        nn.Linear(D, D), lambda inside, x: checkpoint(inside, x, use_reentrant=False)
    ),
    "LoRA by adding two linear layers": Lora,
    "LoRA over a base in 4 bits": lambda: over_quantized(4),
    "LoRA over a base in int8": lambda: over_quantized(8),
    "bfloat16 autocast": lambda: Between(
        nn.Linear(D, D), lambda inside, x: autocast(lambda: inside(x), torch.bfloat16).float()
    ),
    "float16 autocast": lambda: Between(
        nn.Linear(D, D), lambda inside, x: autocast(lambda: inside(x), torch.float16).float()
    ),
    "parameters in 16 bits": lambda: InShort(nn.Linear(D, D)),
    "complex parameters": lambda: Between(
        nn.Linear(D, D, dtype=torch.complex64), lambda inside, x: inside(x * (1 + 2j)).abs()
    ),
    "sparse input of `Linear`": lambda: Between(
        nn.Linear(D, D), lambda inside, x: inside(x[:, 0].to_sparse())[:, None]
    ),
    "`torch.compile` of the model": lambda: Between(nn.Linear(D, D)),
    "`MultiheadAttention`": lambda: Between(
        nn.MultiheadAttention(D, 2, batch_first=True, add_bias_kv=True), attend
    ),
    "`TransformerEncoder`": lambda: Between(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8, batch_first=True), 2)
    ),
    "`TransformerDecoder`": lambda: Between(
        nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 8, batch_first=True), 2),
        lambda inside, x: inside(x, x),
    ),
    "`Transformer`": lambda: Between(
        nn.Transformer(D, 2, 1, 1, 8, batch_first=True), lambda inside, x: inside(x, x)
    ),
    "Opacus's `DPMultiheadAttention`": lambda: Between(
        DPMultiheadAttention(D, 2, add_bias_kv=True, batch_first=True), attend
    ),
    "`LSTM`": lambda: Between(nn.LSTM(D, D, 2, dropout=0.1, batch_first=True), recur),
    "`GRU`": lambda: Between(nn.GRU(D, 3, bidirectional=True, batch_first=True), recur),
    "`RNN`": lambda: Between(nn.RNN(D, D, batch_first=True), recur),
    "`LSTMCell`": lambda: Between(nn.LSTMCell(D, D), run_cell),
    "packed sequences": lambda: Between(nn.LSTM(D, D), recur_packed),
    "Opacus's `DPLSTM`": lambda: Between(DPLSTM(D, D, batch_first=True), recur),
    "`EmbeddingBag`": lambda: Between(
        nn.EmbeddingBag(5, D, mode="max"), lambda inside, x: x + inside(ids_of(x))[:, None]
    ),
    "module with `batch_first=False`": lambda: Between(
        nn.TransformerEncoderLayer(D, 2, 8), time_first
    ),
    "module that `batch_second` names": lambda: NamedInside(
        nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)), time_first
    ),
    "frozen parameters": lambda: Between(nn.Linear(D, D).requires_grad_(False)),
    "dropout beside a layer without a rule": lambda: Between(
        nn.Sequential(Scale(D), nn.Dropout(0.5))
    ),
    "in-place code after a layer": lambda: Between(
        nn.Linear(D, D), lambda inside, x: torch.relu_(inside(x).add_(x))
    ),
}


def autocast(run, dtype: torch.dtype):
    with torch.autocast("cpu", dtype):
        return run()


class InShort(Between):
    """All parameters in float16, as all that is computed but losses."""

    options: ClassVar = {"loss_scale": 16}

    def __init__(self, inside: nn.Module) -> None:
        super().__init__(inside)
        self.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.half()).float()


def step_twice_clipped(scaled: bool) -> None:
    model = nn.Linear(D, D)
    clipping = BookKeeping(model, 1.0)
    optimizer = NoisyOptimizer(
        torch.optim.SGD(model.parameters()), clipping, noise_multiplier=1.0, expected_batch_size=3
    )
    x = torch.randn(B, T, D)
    if scaled:
        scaler = torch.amp.GradScaler("cpu")
        clipping.backward(scaler.scale(model(x).sum((1, 2))))
        scaler.step(optimizer)
    for _ in range(2):
        clipping.backward(model(x).sum((1, 2)))
    optimizer.step()


def clip(
    model: nn.Module, change: Callable[[nn.Module], object] = lambda _: None, **options
) -> None:
    clipping = BookKeeping(model, 1.0, **options)
    change(model)
    clipping.backward(model(torch.randn(B, T, D)).sum((1, 2)))


def in_data_parallel() -> None:
    class Active(nn.parallel.DistributedDataParallel):
        def __init__(self, module):  # no process group
            nn.Module.__init__(self)
            self.module = module

    clip(nn.Sequential(Active(nn.Linear(D, D))))


def thaw(model: nn.Module) -> None:
    model.last.requires_grad_(True)


def hook_a_gradient() -> None:
    model = Between(nn.Linear(D, D))
    model.last.weight.register_hook(torch.sign)
    clip(model)


def frozen_last() -> nn.Module:
    model = Between(nn.ReLU())
    model.last.requires_grad_(False)
    return model


def change_before_backward() -> None:
    model = Between(nn.Linear(D, D))
    clipping = BookKeeping(model, 1.0)
    losses = model(torch.randn(B, T, D)).sum((1, 2))
    model.eval()
    clipping.backward(losses)


def draw_twice() -> None:
    def run(inside, x):
        dropped = nn.Sequential(inside, nn.Dropout(0.5))
        return checkpoint(dropped, x, use_reentrant=False, preserve_rng_state=False)

    model = Between(nn.Linear(D, D), run)
    FlashClipping(model, 1.0).backward(model(torch.randn(B, T, D)).square().sum((1, 2)))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        self.mean += x.detach().mean((0, 1))
        return x


REFUSED: dict[str, Callable[[], object]] = {
    "samples mixed between layers": lambda: clip(
        Between(nn.Linear(D, D), lambda inside, x: inside(x) - inside(x).mean(0))
    ),
    "rows whose sample the graph does not show": lambda: clip(
        Between(nn.Linear(D, D), lambda inside, x: inside(torch.cat([x, x])).flip(0)[: len(x)])
    ),
    "gradient of a parameter in the loss": lambda: clip(
        Between(
            nn.Linear(D, D),
            lambda inside, x: torch.autograd.grad(inside(x).sum(), inside.weight)[0] + x,
        )
    ),
    "model inside of `torch.func.grad`, `vmap` or `jvp`": lambda: clip(
        Between(nn.Linear(D, D), lambda inside, x: torch.func.vmap(inside)(x))
    ),
    "parameter that another module uses": lambda: clip(
        Between(Owner(nn.Linear(D, D)), lambda inside, x: x + inside.token @ torch.eye(D))
    ),
    "another axis first, as long as the batch": lambda: clip(
        Between(nn.Linear(D, D), lambda inside, x: inside(x[:, :B].transpose(0, 1)))
    ),
    "layer that changes between forward and backward": change_before_backward,
    "passes of `FlashClipping` that differ": draw_twice,
    "buffer that forward changes": lambda: clip(Between(Counts())),
    "trained parameter that is not dense": lambda: clip(Multiplier().to(torch.float8_e4m3fn)),
    "other input that is not dense": lambda: clip(
        Between(nn.LayerNorm(D), lambda inside, x: inside(torch.nested.as_nested_tensor(list(x))))
    ),
    "buffer that is not dense": lambda: clip(Between(HasGraph())),
    "module that `batch_second` names wrongly": lambda: clip(
        Between(nn.Linear(D, D), lambda inside, x: inside(x[:, :B])), batch_second=["inside"]
    ),
    "layer that sees tokens in the order of experts": lambda: clip(
        Between(nn.Linear(D, D), in_order_of_experts)
    ),
    "layer that gets another layer": lambda: clip(
        Between(GetsLayer(D), lambda inside, x: inside(x, nn.Linear(D, D)))
    ),
    "dropout inside a layer without a rule": lambda: clip(Between(RandomScale(D))),
    "hook on a parameter's gradient": hook_a_gradient,
    "`BatchNorm1d`": lambda: clip(Between(nn.BatchNorm1d(T))),
    "convolution of an input without a batch axis": lambda: clip(
        Between(nn.Conv1d(B, B, 3, padding=1), lambda inside, x: inside(x.flatten(1)))
    ),
    "`InstanceNorm1d` that tracks statistics": lambda: clip(
        Between(nn.InstanceNorm1d(T, track_running_stats=True))
    ),
    "`LSTM` that gets time for the batch": lambda: clip(
        Between(nn.LSTM(D, D), lambda inside, x: inside(x[:, :B])[0])
    ),
    "`Embedding` with `max_norm`": lambda: clip(looked_up(max_norm=1.0)),
    "parametrized weight": lambda: clip(Between(orthogonal(nn.Linear(D, D)))),
    "`weight_norm` of old": lambda: clip(Between(nn.utils.weight_norm(nn.Linear(D, D)))),
    "thawed parameter": lambda: clip(frozen_last(), thaw),
    "replaced layer": lambda: clip(
        Between(nn.ReLU()), lambda model: setattr(model, "last", nn.Linear(D, D))
    ),
    "`GradScaler`": lambda: step_twice_clipped(scaled=True),
    "float16 losses": lambda: BookKeeping(nn.Linear(D, D), 1.0).backward(torch.zeros(3).half()),
    "`DistributedDataParallel` of a part of the model": in_data_parallel,
    "int8 with a threshold": lambda: clip(over_quantized(8, threshold=6.0)),
    "base in another quantised format": lambda: clip(AwqLoraLinear()),
    "quantised weight that is trained": lambda: clip(over_quantized(8, has_fp16_weights=True)),
    "`DataParallel`": lambda: clip(nn.DataParallel(nn.Linear(D, D))),
    "several batches before a step": lambda: step_twice_clipped(scaled=False),
}


def read_lists() -> dict[str, str]:
    """Return what the lists say: the outcome of each line."""
    text = DOCUMENT.read_text(encoding="utf-8")
    lists = [text.partition(f"## {title}\n\n")[2].split("\n\n")[0] for title in TITLES]
    return {
        re.match(r"\* (.*?)(?:: |$)", " ".join(item.split()))[1]: title.lower()
        for title, items in zip(TITLES, lists, strict=True)
        for item in re.split(r"\n(?=\* )", items)
    }


def test_the_lists_have_what_is_tried_here() -> None:
    assert read_lists() == dict.fromkeys(EXACT, "exact") | dict.fromkeys(REFUSED, "refused")


@pytest.mark.parametrize("way", [FlashClipping, BookKeeping])
@pytest.mark.parametrize("what", EXACT)
def test_what_is_said_to_be_exact_is(what, way) -> None:
    torch.manual_seed(0)
    model = EXACT[what]()
    run = model
    if "compile" in what:
        run = torch.compile(model, backend="eager")
    clipping = way(model, 0.5, **getattr(model, "options", {}))
    if "compile" in what and way is BookKeeping:
        run = torch.compile(model, backend="eager")
    x = torch.randn(B, T, D)

    checked = clipping.check(lambda x: run(x).tanh().square().sum((1, 2)), x)

    assert checked.samples == B
    assert checked.max_relative_error < (0.05 if re.search("16 ", what) else 1e-4)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_said_to_be_refused_is_in_a_sentence(what) -> None:
    with pytest.raises((UnsupportedError, RuntimeError, ValueError)) as refused:
        REFUSED[what]()

    assert type(refused.value) in (UnsupportedError, BatchAxisError, RuntimeError, ValueError)
    assert len(str(refused.value).split()) > 4
    assert "\n" not in str(refused.value)
