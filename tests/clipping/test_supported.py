"""What docs/how-to/what-is-clipped.md says is exact is, and what it says is refused is."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from small_models import Composed, Conv1D, Scale, twice
from torch import nn
from torch.nn.utils.parametrizations import orthogonal
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, FlashClipping, NoisyOptimizer, UnsupportedError
from dpprof.private.errors import BatchAxisError

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "what-is-clipped.md"
TITLES = "Exact", "Refused"
B, T, D = 3, 4, 6


def between(inside, run: Callable = lambda inside, x: inside(x), **parts) -> nn.Module:
    """Something between two linear layers."""
    layers = {"first": nn.Linear(D, D), "inside": inside, "last": nn.Linear(D, D)}
    return Composed(lambda m, x: m.last(run(m.inside, m.first(x))), **layers, **parts)


def linear(run: Callable = lambda inside, x: inside(x)) -> nn.Module:
    return between(nn.Linear(D, D), run)


def in_short() -> nn.Module:
    """All parameters in float16, as all that is computed but losses."""
    return Composed(lambda m, x: m.inner(x.half()).float(), inner=linear().half())


OPTIONS = {
    "parameters in 16 bits": {"loss_scale": 16},
    "module that `batch_second` names": {"batch_second": ["inside"]},
}


def own() -> nn.Module:
    """A layer, and a token beside it."""
    add = lambda m, x: m.layer(x + m.token)  # noqa: E731
    return Composed(add, layer=nn.Linear(D, D), token=torch.randn(1, 1, D))


def multiply() -> nn.Module:
    """A matrix beside layers."""
    run = lambda m, x: m.layers(x @ m.own)  # noqa: E731
    return Composed(run, layers=linear(), own=torch.randn(D, D))


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
    return between(layer.to("cpu"))


def tied() -> nn.Module:
    table, head = nn.Embedding(5, D), nn.Linear(D, 5, bias=False)
    head.weight = table.weight
    return Composed(lambda m, x: m.head(m.table(ids_of(x))), table=table, head=head)


def lora() -> nn.Module:
    layers = {"a": nn.Linear(D, 2, bias=False), "b": nn.Linear(2, D, bias=False)}
    layers["base"] = nn.Linear(D, D).requires_grad_(False)
    return Composed(lambda m, x: m.base(x) + m.b(m.a(x)), **layers)


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


def in_order_of_experts(inside, x):
    tokens = x.flatten(0, 1)
    order = tokens.sum(1).argsort()
    return tokens.index_add(0, order[2:], inside(tokens[order[2:]])).view(x.shape)


def looked_up(**options):
    return between(nn.Embedding(5, D, **options), lambda inside, x: x + inside(ids_of(x)))


EXACT: dict[str, Callable[[], nn.Module]] = {
    "`Linear`": linear,
    "`Embedding`": lambda: looked_up(padding_idx=1),
    "`LayerNorm`": lambda: between(nn.LayerNorm(D)),
    "`RMSNorm`": lambda: between(nn.RMSNorm(D)),
    "RMS norm of another class": lambda: between(OtherRmsNorm()),
    "subclass of `Embedding` that calls `super().forward`": lambda: between(
        ScaledEmbedding(5, D), lambda inside, x: x + inside(ids_of(x))
    ),
    "`Conv1D` of GPT-2": lambda: between(Conv1D(D, D)),
    "subclass that inherits `forward`": lambda: between(Inherits(D, D)),
    "`Conv1d`": lambda: between(nn.Conv1d(D, D, 3, padding=1), over_channels),
    "`ConvTranspose1d`": lambda: between(nn.ConvTranspose1d(D, D, 3, padding=1), over_channels),
    "convolution that changes its weight in `forward`": lambda: between(
        Standardised(D, D, 3, padding=1), over_channels
    ),
    "`InstanceNorm1d`": lambda: between(nn.InstanceNorm1d(D, affine=True), over_channels),
    "`GroupNorm`": lambda: between(nn.GroupNorm(2, D), over_channels),
    "`BatchNorm1d` that is frozen and in `eval()`": lambda: between(
        nn.BatchNorm1d(T).requires_grad_(requires_grad=False).eval()
    ),
    "`PReLU`": lambda: between(nn.PReLU()),
    "`Bilinear`": lambda: between(nn.Bilinear(D, D, D), lambda inside, x: inside(x, x)),
    "positions looked up once for all samples": lambda: between(
        nn.Embedding(T, D), lambda inside, x: x + inside(torch.arange(T))
    ),
    "parameter of a module that contains layers": own,
    "`ParameterDict` for another layer": lambda: between(
        Composed(
            lambda m, x: x * m.held["a"],
            held=nn.ParameterDict({"a": nn.Parameter(torch.ones(D))}),
        )
    ),
    "module that computes with its own parameters": lambda: between(multiply()),
    "experts and their router": lambda: between(Mixture()),
    "samples and tokens in one axis": lambda: linear(
        lambda inside, x: inside(x.flatten(0, 1)).view(x.shape)
    ),
    "several rows for a sample": lambda: linear(
        lambda inside, x: torch.stack(inside(torch.cat([x, x.tanh()])).chunk(2)).prod(0),
    ),
    "loss that contains a gradient of the model": lambda: linear(
        lambda inside, x: torch.autograd.grad(inside(x).sin().sum(), x, create_graph=True)[0],
    ),
    "windows": lambda: linear(lambda inside, x: inside(x.view(-1, 2, D)).view(x.shape)),
    "layer without a rule that returns several tensors": lambda: between(
        Composed(lambda m, x: {"y": (x * m.weight, len(x))}, weight=torch.randn(D)),
        lambda inside, x: inside(x)["y"][0],
    ),
    "layer that is used twice": lambda: between(twice(nn.Linear(D, D))),
    "tied embedding and head": tied,
    "non-reentrant checkpointing": lambda: linear(
        lambda inside, x: checkpoint(inside, x, use_reentrant=False)
    ),
    "LoRA by adding two linear layers": lora,
    "LoRA over a base in 4 bits": lambda: over_quantized(4),
    "LoRA over a base in int8": lambda: over_quantized(8),
    "bfloat16 autocast": lambda: linear(
        lambda inside, x: autocast(lambda: inside(x), torch.bfloat16).float()
    ),
    "float16 autocast": lambda: linear(
        lambda inside, x: autocast(lambda: inside(x), torch.float16).float()
    ),
    "parameters in 16 bits": in_short,
    "complex parameters": lambda: between(
        nn.Linear(D, D, dtype=torch.complex64), lambda inside, x: inside(x * (1 + 2j)).abs()
    ),
    "sparse input of `Linear`": lambda: linear(
        lambda inside, x: inside(x[:, 0].to_sparse())[:, None]
    ),
    "`torch.compile` of the model": linear,
    "`MultiheadAttention`": lambda: between(
        nn.MultiheadAttention(D, 2, batch_first=True, add_bias_kv=True), attend
    ),
    "`TransformerEncoder`": lambda: between(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8, batch_first=True), 2)
    ),
    "`TransformerDecoder`": lambda: between(
        nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 8, batch_first=True), 2),
        lambda inside, x: inside(x, x),
    ),
    "`Transformer`": lambda: between(
        nn.Transformer(D, 2, 1, 1, 8, batch_first=True), lambda inside, x: inside(x, x)
    ),
    "Opacus's `DPMultiheadAttention`": lambda: between(
        DPMultiheadAttention(D, 2, add_bias_kv=True, batch_first=True), attend
    ),
    "`LSTM`": lambda: between(nn.LSTM(D, D, 2, dropout=0.1, batch_first=True), recur),
    "`GRU`": lambda: between(nn.GRU(D, 3, bidirectional=True, batch_first=True), recur),
    "`RNN`": lambda: between(nn.RNN(D, D, batch_first=True), recur),
    "`LSTMCell`": lambda: between(nn.LSTMCell(D, D), run_cell),
    "packed sequences": lambda: between(nn.LSTM(D, D), recur_packed),
    "Opacus's `DPLSTM`": lambda: between(DPLSTM(D, D, batch_first=True), recur),
    "`EmbeddingBag`": lambda: between(
        nn.EmbeddingBag(5, D, mode="max"), lambda inside, x: x + inside(ids_of(x))[:, None]
    ),
    "module with `batch_first=False`": lambda: between(
        nn.TransformerEncoderLayer(D, 2, 8), time_first
    ),
    "module that `batch_second` names": lambda: between(
        nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)), time_first
    ),
    "frozen parameters": lambda: between(nn.Linear(D, D).requires_grad_(False)),
    "dropout beside a layer without a rule": lambda: between(
        nn.Sequential(Scale(D), nn.Dropout(0.5))
    ),
    "in-place code after a layer": lambda: linear(lambda inside, x: torch.relu_(inside(x).add_(x))),
}


def autocast(run, dtype: torch.dtype):
    with torch.autocast("cpu", dtype):
        return run()


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
    model = linear()
    model.last.weight.register_hook(torch.sign)
    clip(model)


def frozen_last() -> nn.Module:
    model = between(nn.ReLU())
    model.last.requires_grad_(False)
    return model


def change_before_backward() -> None:
    model = linear()
    clipping = BookKeeping(model, 1.0)
    losses = model(torch.randn(B, T, D)).sum((1, 2))
    model.eval()
    clipping.backward(losses)


def draw_twice() -> None:
    def run(inside, x):
        dropped = nn.Sequential(inside, nn.Dropout(0.5))
        return checkpoint(dropped, x, use_reentrant=False, preserve_rng_state=False)

    model = linear(run)
    FlashClipping(model, 1.0).backward(model(torch.randn(B, T, D)).square().sum((1, 2)))


def count(m, x):
    m.mean += x.detach().mean((0, 1))
    return x


def with_buffer(value: torch.Tensor, run=lambda _, x: x) -> nn.Module:
    module = Composed(run)
    module.register_buffer("mean", value)
    return module


REFUSED: dict[str, Callable[[], object]] = {
    "samples mixed between layers": lambda: clip(
        linear(lambda inside, x: inside(x) - inside(x).mean(0))
    ),
    "rows whose sample the graph does not show": lambda: clip(
        linear(lambda inside, x: inside(torch.cat([x, x])).flip(0)[: len(x)])
    ),
    "gradient of a parameter in the loss": lambda: clip(
        linear(
            lambda inside, x: torch.autograd.grad(inside(x).sum(), inside.weight)[0] + x,
        )
    ),
    "model inside of `torch.func.grad`, `vmap` or `jvp`": lambda: clip(
        linear(lambda inside, x: torch.func.vmap(inside)(x))
    ),
    "parameter that another module uses": lambda: clip(
        between(own(), lambda inside, x: x + inside.token @ torch.eye(D))
    ),
    "another axis first, as long as the batch": lambda: clip(
        linear(lambda inside, x: inside(x[:, :B].transpose(0, 1)))
    ),
    "layer that changes between forward and backward": change_before_backward,
    "passes of `FlashClipping` that differ": draw_twice,
    "trained tensor that is no parameter of the model": lambda: clip(
        linear(lambda inside, x: inside(x) * torch.ones((), requires_grad=True))
    ),
    "buffer that forward changes": lambda: clip(between(with_buffer(torch.zeros(D), count))),
    "trained parameter that is not dense": lambda: clip(multiply().to(torch.float8_e4m3fn)),
    "other input that is not dense": lambda: clip(
        between(nn.LayerNorm(D), lambda inside, x: inside(torch.nested.as_nested_tensor(list(x))))
    ),
    "buffer that is not dense": lambda: clip(between(with_buffer(torch.eye(D).to_sparse()))),
    "module that `batch_second` names wrongly": lambda: clip(
        linear(lambda inside, x: inside(x[:, :B])), batch_second=["inside"]
    ),
    "layer that sees tokens in the order of experts": lambda: clip(linear(in_order_of_experts)),
    "layer that gets another layer": lambda: clip(
        between(
            Composed(lambda m, x, layer: layer(x) * m.weight, weight=torch.randn(D)),
            lambda inside, x: inside(x, nn.Linear(D, D)),
        )
    ),
    "dropout inside a layer without a rule": lambda: clip(between(RandomScale(D))),
    "hook on a parameter's gradient": hook_a_gradient,
    "`BatchNorm1d`": lambda: clip(between(nn.BatchNorm1d(T))),
    "convolution of an input without a batch axis": lambda: clip(
        between(nn.Conv1d(B, B, 3, padding=1), lambda inside, x: inside(x.flatten(1)))
    ),
    "`InstanceNorm1d` that tracks statistics": lambda: clip(
        between(nn.InstanceNorm1d(T, track_running_stats=True))
    ),
    "`LSTM` that gets time for the batch": lambda: clip(
        between(nn.LSTM(D, D), lambda inside, x: inside(x[:, :B])[0])
    ),
    "`Embedding` with `max_norm`": lambda: clip(looked_up(max_norm=1.0)),
    "weights that are computed for `functional_call`": lambda: clip(
        linear(
            lambda inside, x: torch.func.functional_call(inside, {"weight": 2 * inside.weight}, x)
        )
    ),
    "parametrized weight": lambda: clip(between(orthogonal(nn.Linear(D, D)))),
    "`weight_norm` of old": lambda: clip(between(nn.utils.weight_norm(nn.Linear(D, D)))),
    "thawed parameter": lambda: clip(frozen_last(), thaw),
    "replaced layer": lambda: clip(
        between(nn.ReLU()), lambda model: setattr(model, "last", nn.Linear(D, D))
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


@pytest.mark.parametrize("what", EXACT)
def test_what_is_said_to_be_exact_is(what, way) -> None:
    model = run = EXACT[what]()
    if "compile" in what:
        run = torch.compile(model, backend="eager")
    clipping = way(model, 0.5, **OPTIONS.get(what, {}))
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
