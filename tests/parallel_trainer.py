"""``PrivateTrainer`` and accelerate on several ranks, as ``torchrun`` starts them."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from one_call import seeded
from parallel_training import whole
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

from dpprof.private import PrivacyArguments, PrivateTrainer, make_private

SAMPLES, T, V, BOUND, EXPECTED = 12, 6, 17, 0.3, 4


class Trained(NamedTuple):
    """What a rank made of a training."""

    before: Tensor
    after: Tensor
    drawn: list[list[int]]
    """The samples of each step."""

    logged: list[dict[str, float]]
    history: list[tuple[float, float, int]]


def build() -> nn.Module:
    """Build a classifier without parameters beside layers, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, num_labels=3
    )
    return transformers.LlamaForSequenceClassification(config)


def draw() -> list[dict[str, Tensor]]:
    """Draw samples that all differ."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, V, (SAMPLES, T), generator=generator)
    labels = torch.randint(3, (SAMPLES,), generator=generator)
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


def weights(model: nn.Module) -> Tensor:
    """Join all parameters, whole."""
    return torch.cat([whole(parameter).flatten() for parameter in model.parameters()])


def act_as_torchrun() -> None:
    """Set what ``torchrun`` and ``accelerate launch --cpu`` set."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the group is there already
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as accelerate launch --cpu sets


class Watched(PrivateTrainer):
    """Notes which samples were drawn."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *given: Any) -> Tensor:
        """Take a step."""
        rows = [tuple(one["input_ids"].tolist()) for one in draw()]
        drawn = []
        for batch, part in inputs["parts"]:
            if not part.is_empty:
                drawn += [rows.index(tuple(row)) for row in batch["input_ids"].tolist()]
        self.drawn = [*getattr(self, "drawn", []), drawn]
        return super().training_step(model, inputs, *given)


def run_loop(loop: str) -> tuple[Tensor, Tensor, float]:
    """Run the loop of a document; returns the weights before and after, and epsilon."""
    if distributed.is_initialized():
        act_as_torchrun()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 4), nn.Linear(4, V))
    ids = torch.randint(V, (40, T))
    names: dict[str, Any] = {"model": model, "before": weights(model)}
    names["data_loader"] = DataLoader(TensorDataset(ids, ids), batch_size=20, shuffle=True)
    exec(loop, names)  # noqa: S102
    return names["before"], weights(model), names["private"].epsilon_spent()


def train(
    folder: Path,
    noise: float,
    resume: str | None = None,
    *,
    shards: bool = False,
    privacy: dict[str, Any] | None = None,
    **options: Any,
) -> Trained:
    """Train; resume from a checkpoint of the folder."""
    act_as_torchrun()
    model = build()
    if shards:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    before = weights(model)
    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    trainer = Watched(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **settings | options),
        train_dataset=draw(),
        privacy=PrivacyArguments(
            max_grad_norm=BOUND,
            noise_multiplier=noise,
            delta=1e-3,
            accountant="rdp",
            resume="exact",
            sampling_generator=torch.Generator().manual_seed(1),
            noise_generator=torch.Generator().manual_seed(2),
            **privacy or {},
        ),
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / resume))
    logged = [one for one in trainer.state.log_history if "learning_rate" in one]
    return Trained(before, weights(model), trainer.drawn, logged, trainer.spent.history)


def _make_private(data: Any) -> Any:
    act_as_torchrun()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    settings: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "check": False}
    return make_private(model, optimizer, loader, lambda x: model(x)[:, 0], **settings)


def step_on_data(spread: str) -> int:
    """Take a step on samples that ranks have alike, in another order, or each a half of."""
    data = TensorDataset(torch.arange(24.0)[:, None])
    rank = distributed.get_rank()
    places = {
        "alike": range(24),
        "in another order": torch.randperm(24, generator=seeded(rank)).tolist(),
        "in halves": range(rank, 24, 2),
    }
    private = _make_private(Subset(data, places[spread]))
    for (x,) in private.data_loader:
        private.optimizer.backward(private.model(x)[:, 0])
        private.optimizer.step()
        break
    steps: int = private.optimizer.steps
    return steps


def load_batches_of_first() -> int:
    """Load what the first rank draws from, on all; returns the rank."""
    data = TensorDataset(torch.arange(24.0)[:, None])
    state = [_make_private(data).data_loader.state_dict(exact=True)]
    distributed.broadcast_object_list(state)
    _make_private(data).data_loader.load_state_dict(state[0], exact=True)
    return distributed.get_rank()
