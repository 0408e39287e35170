"""Small Hugging Face models with adapters over a quantised base."""

from typing import Any

import pytest
import torch
from factory import make_experiment
from small_models import one_by_one, private
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.layers.sample_losses import sample_losses
from dpprof.subjects.batches import make_batch
from dpprof.subjects.models.build import build_model
from dpprof.subjects.models.distribute import find_blocks

bitsandbytes: Any = pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

B, T = 4, 7


def make_qlora(name: str, quantization: str | None, **fields: Any) -> Experiment:
    usual = {"model": f"hf:tiny-{name}", "lora": {"rank": 2}, "batch_size": B, "seq_len": T}
    return make_experiment(**usual | {"quantization": quantization} | fields)


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    kinds = bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt
    return {name: one for name, one in model.named_modules() if isinstance(one, kinds)}


def build_qlora(
    name: str, quantization: str, **fields: Any
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build a model whose adapters are not zero, and a batch of ids, labels and masks."""
    experiment = make_qlora(name, quantization, **fields)
    torch.manual_seed(0)
    model = build_model(experiment).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    batch = make_batch(model, torch.device("cpu"), experiment)
    assert batch.mask_BT is not None
    return model, (batch.x, batch.labels, batch.mask_BT)


def losses_of(model: nn.Module, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return sample_losses(model(ids, mask), labels)


def plain_gradient_of_rank(quantization: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of a batch's mean loss by two ranks with shards, and by one alone."""
    gradients = []
    for is_sharded in (True, False):
        model, batch = build_qlora("llama", quantization)
        rows: Any = batch
        if is_sharded:
            for block in find_blocks(model):
                fully_shard(block)
            fully_shard(model)
            rows = [tensor.chunk(2)[distributed.get_rank()] for tensor in batch]
        losses_of(model, *rows).mean().backward()
        trained: list[Any] = [p.grad for p in model.parameters() if p.requires_grad]
        whole = (p.full_tensor() if is_sharded else p for p in trained)
        gradients.append(torch.cat([gradient.flatten() for gradient in whole]))
    return gradients[0], gradients[1]


def step_of_rank(quantization: str, bound: float) -> tuple[Tensor, Tensor]:
    """Take a step on this rank's half of a batch.

    Returns:
        How far the trained parameters went, and where one sample after another would take them.
    """
    model, batch = build_qlora("llama", quantization)
    _, total, _ = one_by_one(lambda *rows: losses_of(model, *rows), model, batch, bound)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    replica = DistributedDataParallel(model)
    clipping = BookKeeping(replica, bound)
    optimizer = private(clipping, model, expected_batch_size=B, generator=torch.Generator())
    rows = [one.chunk(2)[distributed.get_rank()] for one in batch]
    clipping.backward(losses_of(replica, *rows))
    optimizer.step()
    moved = [old - p.detach() for p, old in zip(trained, before, strict=True)]
    return torch.cat([one.flatten() for one in moved]) * B, total
