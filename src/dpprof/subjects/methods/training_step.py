"""The interface of a method: one training step, in phases.

These definitions hold for every method. A sample is one sequence of T tokens or one image, and the
unit of privacy. Its loss is the cross-entropy of its class, or the mean over its labelled tokens.
Its gradient is clipped to an L2 norm of at most C over all parameters together (flat clipping),
unless the method declares another mechanism. A private step applies
``(sum of clipped gradients + N(0, (sigma C)^2)) / B``. Neighbouring batches differ by one added or
removed sample, so the sum has sensitivity C.

Shape legend: B batch, T tokens, V vocabulary or classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.loops import Loss
from dpprof.experiments.config.mechanisms import FLAT
from dpprof.experiments.records.result import NormChoice
from dpprof.experiments.records.terms import Component, Phase
from dpprof.private.allocation_marks import Function
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.sample_losses import sample_losses
from dpprof.private.norms.code_paths import Watch
from dpprof.subjects.models.distribute import distribute

Enter = Callable[[Phase], None]
"""Called when a phase begins; the phase lasts until the next one or the end of the step."""


@dataclass(frozen=True)
class Batch:
    """What a model gets and what it has to find, samples first; iterates over its tensors."""

    x: Tensor  # token ids, (B, T) int64; or images, (B, channels, height, width)
    labels: Tensor  # ids or classes, int64: of tokens (B, T), or of samples (B,)
    mask_BT: Tensor | None = None
    """The mask, for models that take it: 1 for tokens and 0 for padding, (B, T) int64."""

    decoder_BT: Tensor | None = None
    """The ids that the decoder gets where there is an encoder too, (B, T) int64."""

    others: tuple[Tensor, ...] = ()
    """What a model that computes its losses gets beside ``x``. It takes no labels."""

    gives_labels: bool = False  # whether the model gets the labels too, last

    def __iter__(self) -> Iterator[Tensor]:
        each = (self.x, self.labels, self.mask_BT, self.decoder_BT, *self.others)
        return (tensor for tensor in each if tensor is not None)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of the model, samples first."""
        labels = self.labels if self.gives_labels else None
        others = (self.mask_BT, self.decoder_BT, *self.others, labels)
        return (self.x, *(tensor for tensor in others if tensor is not None))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with a function applied to each tensor."""
        optional = (self.mask_BT, self.decoder_BT)
        mask_BT, decoder_BT = (None if tensor is None else function(tensor) for tensor in optional)
        others = tuple(map(function, self.others))
        x, labels = function(self.x), function(self.labels)
        return Batch(x, labels, mask_BT, decoder_BT, others, self.gives_labels)


class ClipGroup(NamedTuple):
    """Parameters whose gradients are clipped together, by their common L2 norm."""

    parameters: Sequence[nn.Parameter]
    bound: float
    epsilon: float = 1e-6  # added to the norm, by which the bound is divided; the value is Opacus's


class TrainingStep(ABC):
    """A method applied to a model.

    Args:
        model: Maps ``Batch.inputs`` to logits (B, T, V) or (B, V). The method may wrap it or add
            hooks; afterwards train ``self.module``.
        experiment: Gives clipping bound, noise multiplier and batch size.

    Raises:
        dpprof.private.UnsupportedError: The method cannot train this model in this way.
    """

    module: nn.Module
    optimizer: Optimizer

    attributes: ClassVar[Mapping[str, Component]] = {}
    """Attributes of parameters that hold tensors, except ``.grad``, with their components."""

    births: ClassVar[Mapping[Function, Component]] = {}
    """Functions that allocate tensors, with their components; those that
    ``private.allocation_marks.allocates`` marks are added."""

    mechanism: ClassVar[str] = FLAT
    """What makes the step private. A method that does not clip all parameters together to
    ``max_grad_norm`` names its own mechanism; ``NO_CLIPPING`` if it clips nothing."""

    sensitivity: ClassVar[float] = 1.0
    """How far one added or removed sample can move the sum before noise: an L2 norm, divided by
    ``noise_bound()``. A value above 1 requires another ``mechanism``, and a docstring of the class
    that states the sensitivity."""

    one_at_a_time: ClassVar[bool] = False
    """Whether samples are processed one after another, so a larger batch needs memory only for its
    tokens."""

    parallel_kinds: ClassVar[Collection[str]] = ()
    """The kinds of ``parallel`` with which the step of all ranks together is the method's."""

    unsupported_ranks: ClassVar[Mapping[str, str]] = {}
    """Why a kind of ``parallel`` is not in ``parallel_kinds``."""

    executions: ClassVar[Collection[str]] = ("eager",)
    """The ways of ``execution`` in which the method's step runs."""

    accumulates: ClassVar[bool] = False  # whether a step may have several batches
    exchanges: ClassVar[Collection[str]] = ("last",)
    """Which of a step's batches may exchange gradients between ranks."""

    correlates: ClassVar[bool] = False  # whether it runs with correlated noise, or without noise
    heads: ClassVar[Collection[str]] = ("logits",)
    """The ways of ``head`` in which the method's step runs."""

    losses: ClassVar[Collection[str]] = ("cross-entropy",)
    """The ways of ``loss`` with which the method's step runs."""

    knows_formats: ClassVar[bool] = False
    """Whether the method's step knows ``loss_scale``, and trained parameters in 16 bits."""

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        self.module = model
        self.experiment = experiment

    @classmethod
    def distribute(
        cls, model: nn.Module, experiment: Experiment, device: torch.device
    ) -> nn.Module:
        """Return a model for this rank, before the method is applied to it.

        Raises:
            UnsupportedError: The method does not support this kind of ``parallel``.
        """
        parallel = experiment.parallel
        if parallel is None:
            return model
        if parallel.kind not in cls.parallel_kinds:
            usual = f"{experiment.method} does not train on several ranks with {parallel.kind}"
            raise UnsupportedError(cls.unsupported_ranks.get(parallel.kind, usual))
        return cls.wrap_for_ranks(model, experiment, device)

    @staticmethod
    def wrap_for_ranks(model: nn.Module, experiment: Experiment, device: torch.device) -> nn.Module:
        """Wrap a model for this rank; by default in PyTorch's DDP or FSDP2."""
        return distribute(model, experiment, device)

    @classmethod
    def smallest_batch_size(cls, experiment: Experiment) -> int:  # noqa: ARG003 (of other methods)
        """Return the least number of samples that a step takes; by default 1."""
        return 1

    def compile(self) -> None:
        """Let ``torch.compile`` compile ``self.module`` where it runs first."""
        self.module.compile()

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Set the optimizer of ``self.module``'s parameters, wrapped if the method needs it."""
        self.optimizer = optimizer

    @abstractmethod
    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave in every parameter's ``.grad`` the gradient for the optimizer."""

    def held_for(self, parameter: nn.Parameter) -> Iterator[tuple[Component, Any]]:
        """Yield what is kept for a parameter beside ``.grad``, tensors or lists of them."""
        for name, component in self.attributes.items():
            yield component, getattr(parameter, name, None)

    def clip_groups(self) -> Sequence[ClipGroup]:
        """Return the groups in which the last ``compute_gradient`` clipped, with their bounds.

        Returns:
            Groups that together hold every trainable parameter of ``self.module`` once; by default
            one group with the bound ``max_grad_norm``. Empty if nothing is clipped, that is, if
            the method is not private.
        """
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        return [ClipGroup(trainable, self.experiment.max_grad_norm)]

    def noise_bound(self) -> float:
        """Return the bound by which the last step scaled its noise; by default ``max_grad_norm``.

        The noise has the standard deviation sigma times this bound.
        """
        return self.experiment.max_grad_norm

    def sample_norms(self) -> Tensor | None:
        """Return the L2 norms of the samples' gradients in the last ``compute_gradient``.

        They are valid until the gradients are cleared.

        Returns:
            Norms before clipping, (B,) over all parameters or (B, groups); None if the method does
            not keep them.
        """
        return None

    def apply_gradient(self) -> None:
        """Step the plain optimizer."""
        self.optimizer.step()

    def run(self, batch: Batch, enter: Enter) -> None:
        """Run one whole step: compute the gradient, step the optimizer, clear the gradients.

        Each library clears by its own default: PyTorch frees gradients, Opacus fills them with
        zeros and frees per-sample gradients.
        """
        self.compute_gradient(batch, enter)
        enter("step")
        self.apply_gradient()
        self.optimizer.zero_grad()

    def capture(self, batch: Batch) -> Callable[[], object]:
        """Return what runs a whole step on a batch as CUDA graphs, after a step as ``run``."""
        raise NotImplementedError(f"{type(self).__name__} does not run as a graph")

    @property
    def norm_plan(self) -> dict[str, NormChoice] | None:
        """How the norms of each matrix were computed last; None if the method has no choice."""
        return None

    @property
    def nonfinite_samples(self) -> int | None:
        """The number of samples left out so far; None if the method leaves none out."""
        return None

    @property
    def reasons(self) -> dict[str, str]:
        """Why figures of the method are null, by dotted key of a result."""
        return {}

    def watch_samplers(self, watch: Watch) -> AbstractContextManager[None]:  # noqa: ARG002
        """Watch which code path each layer takes in the steps inside the context.

        ``watch`` is called instead of each sampler; never if the method has none.
        """
        return nullcontext()


class VersatileStep(TrainingStep):
    """A step that runs in every way that an experiment may ask for, but with one exchange."""

    parallel_kinds: ClassVar[Collection[str]] = ("ddp", "fsdp", "hsdp")
    executions: ClassVar[Collection[str]] = ("eager", "graph", "compiled")
    accumulates = True
    correlates = True
    heads: ClassVar[Collection[str]] = ("logits", "chunked", "kept")
    losses: ClassVar[Collection[str]] = get_args(Loss)
    knows_formats = True


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the samples' losses; a scalar."""
    return sample_losses(logits, labels).mean()
