"""Models with parameters beside layers, clipped on ranks with shards and by definition.

Shape legend: B samples, T tokens, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from parallel_training import WAYS, whole
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.private.errors import UnsupportedError
from dpprof.subjects.models.distribute import find_blocks

T, D, V = 3, 6, 20
BOUND = 0.5
SIDE = 16
BATCHES = [
    ([0, 1], []),
    ([0, 1], [2, 3]),
    ([0, 1, 2], [3]),
    ([4], [0, 1, 2, 3, 5]),
    ([], [4, 5]),
    ([6], []),
    ([], []),
]
"""The samples of two ranks: as many on one as there are tokens, also with a class token; none."""

SAMPLES = 7

TEXT = {
    "vocab_size": V,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
IMAGE = TEXT | {"image_size": SIDE, "patch_size": SIDE // 2, "num_labels": 3}
T5 = {"vocab_size": V, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
SWIN = {
    "image_size": SIDE,
    "patch_size": 2,
    "window_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "drop_path_rate": 0.0,
    "num_labels": 3,
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": TEXT,
    "ViTForImageClassification": IMAGE,
    "T5ForConditionalGeneration": T5 | {"dropout_rate": 0.0},
    "SwinForImageClassification": SWIN,
}


class Beside(nn.Module):
    """Adds and multiplies by parameters of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(T, D))
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale + self.shift).tanh()


class Added(Beside):
    """Puts a token before all others, and adds to them."""

    def forward(self, x: Tensor) -> Tensor:
        token = self.scale.view(1, 1, D).expand(len(x), -1, -1)
        y = self.layer(torch.cat([token, x + self.shift], 1)).tanh()
        return y[:, 1:] + y[:, :1]


class Product(nn.Module):
    """Multiplies by a matrix of its own beside a layer, which shows that it runs as one."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.layer = nn.Parameter(torch.randn(D, D)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ self.own).tanh()


class Sorted(nn.Module):
    """Gives layers its tokens in another order, which nothing shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(D, D)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(-1).flatten().argsort()
        tokens = x.reshape(-1, D)[order]
        y = torch.empty_like(tokens)
        y[order] = functional.linear(
            functional.linear(tokens, self.layers[0]).tanh(), self.layers[1]
        )
        return y.view(x.shape)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "added": Added,
    "beside": Beside,
    "product": Product,
    "sorted": Sorted,
}


class Stack(nn.Module):
    """Blocks with a module each, between two layers; positions are looked up once."""

    def __init__(self, make: Callable[[], nn.Module], *, is_checkpointed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(V, D), nn.Linear(D, V)
        self.positions = nn.Embedding(T, D)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.first(ids_BT) + self.positions(torch.arange(T))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.last(x)


def build(name: str, *, is_checkpointed: bool = False) -> nn.Module:
    """Build a model in float64."""
    torch.manual_seed(0)
    if name in MODULES:
        model: nn.Module = Stack(MODULES[name], is_checkpointed=is_checkpointed)
    else:
        import transformers  # noqa: PLC0415 (slow)

        model_class = getattr(transformers, name)
        model = model_class(model_class.config_class(**TRANSFORMERS[name]))
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.double().train()


def draw(name: str) -> Tensor:
    """Draw the inputs of all samples."""
    generator = torch.Generator().manual_seed(3)
    if "Image" in name:
        return torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return torch.randint(2, V, (SAMPLES, T), generator=generator)


def losses_of(run: Callable[..., Any], name: str, inputs: Tensor) -> Tensor:
    """Compute losses; (B,)."""
    if name in MODULES:
        logits = run(inputs)
    elif "Image" in name:
        return run(pixel_values=inputs).logits.logsumexp(1)
    else:
        named = {"decoder_input_ids": inputs} if name.startswith("T5") else {}
        logits = run(input_ids=inputs, **named).logits
    each = functional.cross_entropy(logits.transpose(1, 2), inputs, reduction="none")
    return each.mean(1)


def clip_by_definition(name: str, samples: list[int]) -> dict[str, Tensor]:
    """Clip the gradient of one sample after the other, and add."""
    model = build(name)
    parameters = dict(model.named_parameters())
    sums = {one: torch.zeros_like(p) for one, p in parameters.items()}
    for at in samples:
        loss = losses_of(model, name, draw(name)[at : at + 1]).sum()
        found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        norm = torch.cat([one.flatten() for one in found]).norm()
        factor = min(1.0, BOUND / (float(norm) + 1e-6))
        for one, gradient in zip(sums, found, strict=True):
            sums[one] += factor * gradient
    return sums


def clip(name: str, way: str, settings: dict[str, Any], checkpointed: bool) -> float:
    """Clip all batches; returns the largest difference from the definition."""
    model = build(name, is_checkpointed=checkpointed)
    for block in find_blocks(model):
        fully_shard(block)
    fully_shard(model)
    clipping = WAYS[way](model, BOUND, **settings)
    differences = []
    for ranks in BATCHES:
        own = ranks[distributed.get_rank()]
        clipping.backward(losses_of(model, name, draw(name)[own or [0]])[: len(own)])
        expected = clip_by_definition(name, [one for samples in ranks for one in samples])
        for one, parameter in model.named_parameters():
            found = 0 if parameter.grad is None else whole(parameter.grad)
            differences.append(float((found - expected[one]).abs().max()))
        model.zero_grad()
    clipping.remove()
    return max(differences)


class Heads(nn.Module):
    """Expands a bias to heads, and then adds it to every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.own = nn.Parameter(torch.randn(1, T, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)[:, None] + self.own.expand(HEADS, -1, -1).unsqueeze(0)
        return self.last(x.mean(1)).square().sum((1, 2))


HEADS = 3


def clip_as_many_samples_as_heads() -> tuple[str, bool]:
    """Clip a batch that looks otherwise on rank 0; returns its error, and whether others work."""
    torch.manual_seed(0)
    model = fully_shard(Heads())
    clipping = WAYS["flash-bk"](model, BOUND)

    def clip(samples: int) -> None:
        clipping.backward(model(torch.randn(samples, T, D)))
        model.zero_grad()

    for samples in (4, 2, 4):
        clip(samples)
    verified = clipping.first_batch_verified
    try:
        clip(HEADS if distributed.get_rank() == 0 else 2)
    except UnsupportedError as error:
        clip(4)
        return str(error), verified and clipping.first_batch_verified
    return "", False


class Positions(nn.Module):
    """Looks positions up for each sample, or later once for all."""

    once = False

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(T, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(T)
        found = self.table(ids if self.once else ids.expand(len(x), T))
        return self.last(x + found).square().sum((1, 2))


def clip_in_a_late_way() -> None:
    """Let a table enter for all samples on rank 0 in the second batch."""
    model = fully_shard(Positions())
    clipping = WAYS["flash-bk"](model, BOUND)
    for once in (False, distributed.get_rank() == 0):
        model.once = once
        clipping.backward(model(torch.randn(3, T, D)))
        model.zero_grad()


def shard_inside(name: str, as_one: list[str]) -> None:
    """Clip a model whose blocks have layers that are sharded by themselves."""
    model = build(name)
    for block in model.get_submodule("blocks").children():
        fully_shard(block.get_submodule("layer"))
        fully_shard(block)
    fully_shard(model)
    clipping = WAYS["flash-bk"](model, BOUND, as_one=as_one)
    clipping.backward(losses_of(model, name, draw(name)[:2]))
