"""Opacus's methods on several ranks, each of which runs these functions, and on one."""

import math
import warnings
from typing import Any

import torch
from factory import make_experiment
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.fsdp_utils import FSDP2Wrapper
from parallel_training import named, whole
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.result import Measurement
from dpprof.measure.instruments import memory
from dpprof.private.substitutes import substitute
from dpprof.subjects.batches import make_batch
from dpprof.subjects.methods.opacus import fsdp
from dpprof.subjects.methods.opacus.adaptive import OpacusAdaptive
from dpprof.subjects.methods.training_step import Batch, TrainingStep
from dpprof.subjects.models.build import apply_dtype, build_model

SAMPLES = 2
"""Of each rank."""

BOUND = 1.0
JOINT = 12
"""Samples that are drawn."""

CPU = torch.device("cpu")


def draw_model(experiment: Experiment) -> tuple[nn.Module, Batch]:
    """Draw a model and the joint batch, the same on every rank."""
    torch.manual_seed(0)
    model = apply_dtype(build_model(experiment), experiment, CPU).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    joint = experiment.model_copy(update={"batch_size": JOINT})
    return model, make_batch(model, torch.device("cpu"), joint)


def describe(**fields: Any) -> Experiment:
    """Describe an experiment without noise in float64."""
    usual = {"dtype": "float64", "batch_size": SAMPLES, "noise_multiplier": 0}
    return make_experiment(**usual | {"max_grad_norm": BOUND} | fields)


def describe_ranks(method: str, kind: str, **fields: Any) -> Experiment:
    """Describe an experiment of all ranks."""
    parallel = {"kind": kind, "world_size": distributed.get_world_size()}
    return describe(method=method, parallel=parallel, **fields)


def build(experiment: Experiment, model: nn.Module) -> TrainingStep:
    """Apply an experiment's method to a model."""
    method = registry.load("methods", experiment.method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step: TrainingStep = method(method.distribute(model, experiment, CPU), experiment)
    step.attach_optimizer(optimise(step.module))
    return step


def optimise(module: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer that remembers."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.5, momentum=0.9)


def own_part(batch: Batch) -> Batch:
    """Return this rank's samples."""
    start = distributed.get_rank() * SAMPLES
    return batch.map(lambda tensor: tensor[start : start + SAMPLES])


def train(step: TrainingStep, batch: Batch) -> tuple[dict[str, Tensor], Tensor | None]:
    """Take two steps; returns the whole weights, and the norms of the first."""
    step.compute_gradient(batch, lambda _: None)
    norms = step.sample_norms()
    step.apply_gradient()
    step.optimizer.zero_grad()
    step.run(batch, lambda _: None)
    return {name.split("module.")[-1]: whole(p) for name, p in named(step.module)}, norms


def train_rank(**fields: Any) -> tuple[dict[str, Tensor], Tensor | None]:
    """Train this rank's part of the joint batch."""
    experiment = describe_ranks(**fields)
    model, batch = draw_model(experiment)
    return train(build(experiment, model), own_part(batch))


def train_alone(ranks: int, **fields: Any) -> tuple[dict[str, Tensor], Tensor | None]:
    """Train the joint batch in one process."""
    experiment = describe(batch_size=ranks * SAMPLES, **fields)
    model, batch = draw_model(experiment)
    return train(build(experiment, model), batch.map(lambda tensor: tensor[: ranks * SAMPLES]))


def step_apart_and_whole(method: str, kind: str) -> tuple[Tensor, Tensor]:
    """Take a step with noise, and Opacus's own of the same batch; returns all weights of both."""
    experiment = describe_ranks(method, kind, noise_multiplier=1.0)
    model, batch = draw_model(experiment)
    step, own = build(experiment, model), own_part(batch)
    torch.manual_seed(1 + distributed.get_rank())
    step.run(own, lambda _: None)

    plain, _ = draw_model(experiment)
    wrap = {"ddp": DifferentiallyPrivateDistributedDataParallel, "fsdp": FSDP2Wrapper}[kind]
    wrapped = wrap(plain)
    count = len(list(wrapped.parameters()))
    per_layer, ghost = method == "opacus-per-layer", method == "opacus-ghost"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that its random numbers are not for secrets
        module, optimizer, *criterion, _ = PrivacyEngine().make_private(
            module=wrapped,
            optimizer=optimise(wrapped),
            data_loader=DataLoader(TensorDataset(torch.zeros(2 * SAMPLES)), batch_size=2 * SAMPLES),
            noise_multiplier=1.0,
            max_grad_norm=[BOUND / math.sqrt(count)] * count if per_layer else BOUND,
            clipping="per_layer" if per_layer else "flat",
            grad_sample_mode=("ghost_fsdp" if kind == "fsdp" else "ghost") if ghost else "hooks",
            poisson_sampling=False,
        )
    torch.manual_seed(1 + distributed.get_rank())
    logits = module(*own.inputs)
    given = (logits.flatten(0, 1), own.labels.flatten())
    loss = criterion[0](*given, shape=logits.shape) if criterion else nn.CrossEntropyLoss()(*given)
    loss.backward()
    optimizer.step()
    found = [torch.cat([whole(p).flatten() for p in m.parameters()]) for m in (step.module, module)]
    return found[0], found[1]


def draw_noise(method: str, kind: str) -> tuple[Tensor, bool]:
    """Return the noise of a step, whole, and whether any module is sharded."""
    model_of = {"vocab_size": 200, "d_model": 32, "layers": 1, "heads": 2}
    gradients = []
    for sigma in (3.0, 0.0):
        experiment = describe_ranks(method, kind, model=model_of, noise_multiplier=sigma)
        model, batch = draw_model(experiment)
        step = build(experiment, model)
        torch.manual_seed(distributed.get_rank())
        step.compute_gradient(own_part(batch), lambda _: None)
        gradients.append(torch.cat([whole(p.grad).flatten() for p in step.module.parameters()]))
    sharded = any(isinstance(module, FSDPModule) for module in step.module.modules())
    return gradients[0] - gradients[1], sharded


class _Twice(nn.Module):
    """A layer after itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))  # type: ignore[no-any-return]


def use_a_layer_twice() -> None:
    """Run a model that uses a layer twice."""
    experiment = describe_ranks("opacus-ghost", "fsdp")
    model: Any
    model, batch = draw_model(experiment)
    model.norm = _Twice(model.norm)
    build(experiment, model).run(own_part(batch), lambda _: None)


def train_few_rows() -> None:
    """Train a model with one position on two ranks, which is not refused."""
    with substitute(fsdp, "refuse_few_rows", lambda *_: None):
        train_rank(method="opacus-ghost", kind="fsdp", seq_len=1)


def adapt_bounds() -> float:
    """Return the bound of Opacus's adaptive clipping after a step that is not refused."""
    with substitute(OpacusAdaptive, "parallel_kinds", ("ddp",)):
        experiment = describe_ranks("opacus-adaptive", "ddp")
        model, batch = draw_model(experiment)
        step = build(experiment, model)
    torch.manual_seed(distributed.get_rank())
    step.run(own_part(batch), lambda _: None)
    return step.noise_bound()


def record(spec: str) -> tuple[Any, ...]:
    """Run the instrument memory on this rank."""
    return tell(memory.measure(Experiment.model_validate_json(spec), lambda _: None))


def tell(measurement: Measurement) -> tuple[Any, ...]:
    """Return a step's peak, that of the first step, who owns it, and what ranks exchange."""
    found = measurement.memory
    assert found is not None
    peaks = (found.peak_allocated_bytes, found.first_step_peak_allocated_bytes)
    return *peaks, found.at_peak, measurement.communication
