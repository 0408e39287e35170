"""Sets up what every instrument measures: model, method, optimizer and batch."""

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.optim import SGD, Optimizer

from dpprof.experiments.config import registry
from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.mechanisms import NO_CLIPPING
from dpprof.experiments.config.optimizers import BITSANDBYTES
from dpprof.experiments.config.refusals import INDEPENDENT
from dpprof.experiments.records.result import ModelFacts
from dpprof.experiments.records.terms import Component, Phase
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.batches import make_batch
from dpprof.subjects.methods.training_step import Batch, Enter, TrainingStep
from dpprof.subjects.models.build import apply_dtype, build_model
from dpprof.subjects.models.quantized import (
    count_elements,
    count_unquantized_experts,
    follow_weights,
    import_bitsandbytes,
)
from dpprof.subjects.models.transformer import find_attention
from dpprof.subjects.optimizers import make_optimizer

Held = Callable[[nn.Parameter], Iterable[tuple[Component, Any]]]
"""Returns what a method keeps for a parameter beside ``.grad``, with its component."""


class TensorHolders(NamedTuple):
    """The objects that hold tensors at a moment."""

    module: nn.Module
    optimizer: Optimizer | None = None
    batch: Batch | None = None
    held_for: Held = lambda _: ()


class Training(NamedTuple):
    """A method applied to a model, with a batch."""

    step: TrainingStep
    batch: Batch
    model: ModelFacts

    @property
    def holders(self) -> TensorHolders:
        """The objects that hold the training's tensors."""
        return TensorHolders(
            self.step.module, self.step.optimizer, self.batch, held_for=self.step.held_for
        )

    def run_phases(
        self, enter: Enter, around: Callable[[Phase], AbstractContextManager[object]]
    ) -> None:
        """Run one step, each phase inside a context of its own.

        ``around`` returns the context of a phase; ``enter`` is called before it.
        """
        with ExitStack() as current:

            def begin(phase: Phase) -> None:
                current.close()
                enter(phase)
                current.enter_context(around(phase))

            self.step.run(self.batch, begin)


def import_method(experiment: Experiment) -> type[TrainingStep]:
    """Import everything that the experiment needs, and return its method.

    Call this before the memory limit applies, which must not interrupt an import, and before the
    first snapshot, which must not count libraries as memory of the training.

    Raises:
        EntryPointError: The method or the model cannot be imported, or the method is no
            ``TrainingStep``.
        UnsupportedError: transformers or peft is missing, or has no such model.
    """
    method = registry.load("methods", experiment.method)
    if not (isinstance(method, type) and issubclass(method, TrainingStep)):
        raise registry.EntryPointError(
            "methods",
            experiment.method,
            "is no subclass of dpprof.subjects.methods.training_step.TrainingStep",
        )
    if isinstance(experiment.model, str):
        registry.load("models", experiment.model)
    if isinstance(experiment.model, Architecture):
        importlib.import_module("dpprof.subjects.models.hugging_face").import_architecture(
            experiment
        )
    if experiment.optimizer in BITSANDBYTES:
        import_bitsandbytes()
    find_attention(experiment.attention)
    if experiment.parallel is not None and experiment.parallel.is_sharded:
        importlib.import_module("torch.distributed.fsdp")
    # The first optimizer of a process imports torch._dynamo: 800 modules, 70 MiB.
    SGD([torch.zeros(1)], lr=1.0)
    return method


def set_up(
    experiment: Experiment,
    method: type[TrainingStep],
    device: torch.device,
    moment: Callable[[str, TensorHolders], None],
) -> Training:
    """Build an experiment's model, method, optimizer and batch on a prepared device.

    ``moment`` is called at ``model_loaded``, ``wrapped_with_dp`` and ``optimizer_created`` with the
    objects that hold tensors then.
    """
    _refuse_settings(experiment, method)
    torch.manual_seed(experiment.seed)
    built: Any = build_model(experiment)
    if experiment.loss == "labels" and method.mechanism != NO_CLIPPING:
        built.lose_by_sample()
    model = built.to(device)
    follow_weights(model)
    model = apply_dtype(model, experiment, device).train()
    facts = ModelFacts(
        parameters_total=sum(map(count_elements, model.parameters())),
        parameters_trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        parameters_bytes=sum(p.nbytes for p in model.parameters()),
        unquantized_experts_bytes=count_unquantized_experts(model, experiment),
    )
    model = method.distribute(model, experiment, device)
    moment("model_loaded", TensorHolders(model))
    step = method(model, experiment)
    if experiment.execution == "compiled":
        step.compile()
    moment("wrapped_with_dp", TensorHolders(step.module, held_for=step.held_for))
    trainable = [p for p in step.module.parameters() if p.requires_grad]
    step.attach_optimizer(make_optimizer(experiment, trainable))
    moment("optimizer_created", TensorHolders(step.module, step.optimizer, held_for=step.held_for))
    if distributed.is_initialized() and distributed.get_rank():
        torch.manual_seed(experiment.seed + distributed.get_rank())  # other samples on other ranks
    batch = make_batch(model, device, experiment)
    return Training(step, batch, facts)


def _refuse_settings(experiment: Experiment, method: type[TrainingStep]) -> None:
    ways = (("execution", method.executions), ("head", method.heads), ("loss", method.losses))
    for name, supported in ways:
        setting = getattr(experiment, name)
        if setting not in supported:
            raise UnsupportedError(
                f"{experiment.method} does not run with {name} {setting}; it runs with "
                f"{', '.join(supported)}"
            )
    if not method.knows_formats and (
        experiment.loss_scale != 1 or experiment.trained_dtype != "float32"
    ):
        raise UnsupportedError(
            f"{experiment.method} knows neither loss_scale nor trained_dtype: it sums gradients as "
            "they come, in the dtype of the parameters"
        )
    lora, strategy, ranks = experiment.lora, experiment.noise_strategy, experiment.parallel
    has_vectors = lora is not None and (lora.use_dora or lora.ia3)
    for is_refused, setting in (
        (
            experiment.accumulation > 1 and not method.accumulates,
            "accumulation; closest: accumulation 1, or method flash-bk",
        ),
        (
            ranks is not None and ranks.exchange not in method.exchanges,
            "parallel.exchange each: its sums wait for the last batch; closest: last",
        ),
        (
            strategy != INDEPENDENT and not method.correlates,
            f"noise_strategy {strategy}; its noise is {INDEPENDENT}",
        ),
        (
            has_vectors and experiment.method.startswith("opacus"),
            "use_dora or ia3: Opacus knows no rule for their vectors; closest: method flash-bk",
        ),
    ):
        if is_refused:
            raise UnsupportedError(f"{experiment.method} does not run with {setting}")
