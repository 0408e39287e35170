"""Private training of small models on several ranks, and on one with the joint batch.

Shape legend: B samples, T tokens, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from dpprof.clipping.book_keeping import BookKeeping
from dpprof.clipping.optimizer import NoisyOptimizer
from dpprof.clipping.two_pass import FlashClipping
from dpprof.models.transformer import Transformer
from dpprof.spec.experiment import Dimensions

T, V, D = 5, 13, 8
"""Neither 2 nor 4 divides V: shards of the table are uneven."""

WAYS = {"flash": FlashClipping, "flash-bk": BookKeeping}
BOUND = 0.5
EXPECTED = 4
SAMPLES = 12

Parts = list[list[int]]
"""The samples of each part of a batch."""


class Case(NamedTuple):
    """How a model is trained."""

    model: str = "ours"
    way: str = "flash-bk"
    kind: str = "fsdp"
    tied: bool = False
    checkpointing: bool = False
    reshard: bool = True


def build(case: Case) -> nn.Module:
    """Build a model in float64, the same on every rank."""
    torch.manual_seed(0)
    builders = {"ours": _build_ours, "gpt2": _build_gpt2}
    model = builders.get(case.model, _build_llama)(case)
    if case.model == "adapters":
        model = _add_adapters(model)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().train()


def _build_ours(case: Case) -> nn.Module:
    dimensions = Dimensions(vocab_size=V, d_model=D, layers=2, heads=2)
    checkpointing = "non-reentrant" if case.checkpointing else "none"
    model = Transformer(dimensions, T, checkpointing=checkpointing)
    if case.tied:
        model.head.weight = model.token_embedding.weight
    return model


def _build_gpt2(case: Case) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=V,
        n_positions=T,
        n_embd=D,
        n_layer=2,
        n_head=2,
        tie_word_embeddings=case.tied,
        use_cache=False,
        **off,
    )
    return _checkpoint(GPT2LMHeadModel(config), case)


def _build_llama(case: Case) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=T,
        tie_word_embeddings=case.tied,
        use_cache=False,
    )
    return _checkpoint(LlamaForCausalLM(config), case)


def _add_adapters(model: Any) -> nn.Module:
    import peft  # noqa: PLC0415

    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))


def _checkpoint(model: Any, case: Case) -> nn.Module:
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def blocks_of(model: Any) -> Any:
    """Return the blocks of a model."""
    if isinstance(model, Transformer):
        return model.blocks
    model = model.base_model.model if hasattr(model, "peft_config") else model
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def distribute(model: nn.Module, case: Case, **options: Any) -> nn.Module:
    """Let all ranks train a model."""
    if case.kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, **options)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=case.reshard, **options)
    return fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard, **options)


def draw_data() -> tuple[Tensor, Tensor]:
    """Draw tokens and labels of all samples; (B, T) each."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(V, (SAMPLES, T + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def losses_of(model: nn.Module, case: Case, samples: list[int], *, alone: bool = False) -> Tensor:
    """Compute the losses of some samples; of none too, as a rank of a group must."""
    if not samples and (alone or case.kind == "ddp"):
        return torch.zeros(0)
    ids_BT, labels_BT = (part[samples or [0]] for part in draw_data())
    if case.model == "ours":
        logits_BTV = model(ids_BT)
    else:
        positions_BT = torch.arange(T).repeat(len(ids_BT), 1)
        logits_BTV = model(input_ids=ids_BT, position_ids=positions_BT).logits
    if logits_BTV.dtype == torch.bfloat16:
        logits_BTV = logits_BTV.float()
    losses_BT = functional.cross_entropy(logits_BTV.transpose(1, 2), labels_BT, reduction="none")
    return losses_BT.mean(1)[: len(samples)]


class Trained(NamedTuple):
    """What training made, whole."""

    sums: list[dict[str, Tensor]]
    """The sum of clipped gradients of each step, by parameter."""

    weights: dict[str, Tensor]
    norms: list[Tensor]


def train(
    model: nn.Module, case: Case, steps: list[Parts], *, alone: bool = False, bound: float = BOUND
) -> Trained:
    """Train without noise, each batch in parts."""
    clipping = WAYS[case.way](model, bound)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = NoisyOptimizer(sgd, clipping, noise_multiplier=0.0, expected_batch_size=EXPECTED)
    sums, norms = [], []
    for parts in steps:
        for at, samples in enumerate(parts):
            optimizer.signal_skip_step(at < len(parts) - 1)
            clipping.backward(losses_of(model, case, samples, alone=alone))
            norms.append(clipping.sample_norms)
            optimizer.step()
            if at == len(parts) - 1:
                trained = [(name, p) for name, p in named(model) if p.requires_grad]
                sums.append({name: whole(p.grad) * EXPECTED for name, p in trained})
            optimizer.zero_grad()
    return Trained(sums, {name: whole(p) for name, p in named(model)}, norms)


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List parameters by the names that the model has alone."""
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters()]


def whole(tensor: Tensor) -> Tensor:
    """Return all shards of a tensor.

    ``full_tensor`` corrupts the heap on gloo, once in thousands of calls: two threads note a
    collective's name without a lock, and that of its collective, ALLGATHER_COALESCED, is so long
    that it lies on the heap.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    shards: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(shards, tensor.to_local())
    (placement,) = tensor.placements
    return torch.cat(shards, placement.dim)


def train_ranks(case: Case, steps: list[list[Parts]]) -> Trained:
    """Train this rank's part of every batch."""
    own = [parts[distributed.get_rank()] for parts in steps]
    return train(distribute(build(case), case), case, own)


def train_alone(case: Case, steps: list[list[Parts]]) -> Trained:
    """Train with the joint batches in one process."""
    joint = [[[one for parts in ranks for part in parts for one in part]] for ranks in steps]
    return train(build(case), case, joint, alone=True)
