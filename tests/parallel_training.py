"""Private training of small models on several ranks, and on one with the joint batch.

Shape legend: B samples, T tokens, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from dpprof.experiments.config.experiment import Experiment
from dpprof.private import linear_cross_entropy
from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.engine.flash_clipping import FlashClipping
from dpprof.private.layers.model_heads import find_head, hidden_states_of
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.subjects.models.build import build_model
from dpprof.subjects.models.distribute import find_blocks

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
    head: str = "logits"
    stability: float | None = None


class WithLoss(nn.Module):
    """A model that returns the losses of tokens, without logits; (B, T)."""

    def __init__(self, model: nn.Module, *, keep: bool) -> None:
        super().__init__()
        self.model, self.keep = model, keep

    def forward(self, labels_BT: Tensor, *inputs: Tensor) -> Tensor:
        head = find_head(self.model)
        with hidden_states_of(head) as given:
            self.model(*inputs)
        return linear_cross_entropy(given[0], head, labels_BT, keep=self.keep)


class WithScales(nn.Module):
    """A model with parameters of its own beside its layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.scales, self.shift = (nn.Parameter(torch.ones(V)) for _ in range(2))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs) * self.scales + self.shift


def build(case: Case) -> nn.Module:
    """Build a model in float64, the same on every rank."""
    torch.manual_seed(0)
    model: dict[str, Any] = {"vocab_size": V, "d_model": D, "layers": 2, "heads": 2}
    if case.model == "bert":
        model = {"hf": "tiny-bert", "vocab_size": V, "task": "masked-lm"}
    elif case.model not in ("ours", "beside"):
        name = "tiny-llama" if case.model == "adapters" else f"tiny-{case.model}"
        model = {"hf": name, "vocab_size": V, "tie_word_embeddings": case.tied}
    settings = {"method": "flash", "device": "cpu", "batch_size": 1, "seq_len": T, "model": model}
    settings["checkpointing"] = "non-reentrant" if case.checkpointing else "none"
    if case.model == "adapters":
        settings["lora"] = "rank=2,target_modules=all-linear"
    built: Any = build_model(Experiment.model_validate(settings))
    if case.model == "beside":
        built = WithScales(built)
    if case.model == "ours" and case.tied:
        built.head.weight = built.token_embedding.weight
    for module in built.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
    if case.head != "logits":
        built = WithLoss(built, keep=case.head == "kept")
    return built.double().train()


def distribute(model: nn.Module, case: Case, **options: Any) -> nn.Module:
    """Let all ranks train a model."""
    if case.kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, **options)
    mesh = make_mesh(case.kind)
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=case.reshard, **options)
    return fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard, **options)


def make_mesh(kind: str) -> DeviceMesh:
    """Return all ranks as a mesh of shards, or of two replicas of shards."""
    size = distributed.get_world_size()
    if kind == "hsdp":
        names = ("replicas", "shards")
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
    return init_device_mesh("cpu", (size,))


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
    masks = [] if case.model in ("ours", "beside") else [torch.ones_like(ids_BT)]
    if case.head != "logits":
        return model(labels_BT, ids_BT, *masks).mean(1)[: len(samples)]
    logits_BTV = model(ids_BT, *masks)
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
    clipping = WAYS[case.way](model, bound, stability=case.stability)
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
    *_, placement = tensor.placements
    replicas = tensor.device_mesh.mesh.view(-1, tensor.device_mesh.shape[-1]).tolist()
    found = [torch.cat([shards[rank] for rank in ranks], placement.dim) for ranks in replicas]
    assert all(torch.equal(one, found[0]) for one in found), "replicas differ"
    return found[0]


def train_ranks(case: Case, steps: list[list[Parts]]) -> Trained:
    """Train this rank's part of every batch."""
    own = [parts[distributed.get_rank()] for parts in steps]
    return train(distribute(build(case), case), case, own)


def train_alone(case: Case, steps: list[list[Parts]]) -> Trained:
    """Train with the joint batches in one process."""
    joint = [[[one for parts in ranks for part in parts for one in part]] for ranks in steps]
    return train(build(case), case, joint, alone=True)
