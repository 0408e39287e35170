"""What every method offers: one training step, told phase by phase.

Privacy unit and definitions, the same for every method: a sample is one sequence of T
tokens, its loss is the mean cross-entropy over its labelled tokens, and its gradient is
clipped to an L2 norm of at most C over all parameters together (flat clipping), unless a
method declares another mechanism. A private step
applies ``(sum of clipped gradients + N(0, (sigma C)^2)) / B``. Neighbouring batches
differ by one sample added or removed; sensitivity of the sum is C.

Shape legend: B batch, T tokens, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from dpprof.norms.code_paths import CodePath
from dpprof.records.births import Function
from dpprof.records.result import NormChoice
from dpprof.records.terms import Component, Phase
from dpprof.spec.experiment import Experiment
from dpprof.spec.mechanisms import FLAT

UNLABELLED = -100
"""The label of a token that no loss counts, as PyTorch's cross-entropy has it."""

Enter = Callable[[Phase], None]
"""Called as a phase begins; it lasts until the next one or the end of the step."""


Watch = Callable[[nn.Module, CodePath, Callable[..., Any], tuple[Any, ...]], Any]
"""Called with a layer, its code path, the sampler that finds the layer's per-sample gradients
or their norms, and the sampler's arguments; must return what the sampler returns for them."""


class Batch(NamedTuple):
    """Token ids and the ids to predict, both (B, T) int64."""

    tokens_BT: Tensor
    labels_BT: Tensor


class ClipGroup(NamedTuple):
    """Parameters whose gradient is clipped as one: to an L2 norm over all of them."""

    parameters: Sequence[nn.Parameter]
    bound: float
    epsilon: float = 1e-6
    """Added to the norm by which the bound is divided; Opacus's flat clipping has this much."""


class TrainingStep(ABC):
    """One method applied to one model.

    Args:
        model: Maps token ids (B, T) to logits (B, T, V). It is wrapped or given hooks
            where the method needs that; train ``self.module`` afterwards.
        experiment: Clipping bound, noise multiplier and batch size are taken from it.

    Raises:
        dpprof.spec.registry.UnsupportedError: The method cannot train this model in this way.
    """

    module: nn.Module
    optimizer: Optimizer

    attributes: ClassVar[Mapping[str, Component]] = {}
    """Components by the attribute of a parameter that holds them, ``.grad`` excepted."""

    births: ClassVar[Mapping[Function, Component]] = {}
    """Components by the function in whose code they are allocated, beside functions that
    ``records.births.allocates`` marks."""

    mechanism: ClassVar[str] = FLAT
    """What makes the step private. A method that clips in another way than all parameters as
    one to ``max_grad_norm`` names its own; one that clips nothing says ``NO_CLIPPING``."""

    sensitivity: ClassVar[float] = 1.0
    """By how much one sample, added or removed, can change the sum before noise: an L2 norm,
    over ``noise_bound()``. Above 1 it takes another ``mechanism`` and a docstring of the class
    that states the sensitivity."""

    one_at_a_time: ClassVar[bool] = False
    """Whether samples are processed one after another, so that of a larger batch only its
    tokens take more memory."""

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        self.module = model
        self.experiment = experiment

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Take the optimizer over ``self.module``'s parameters, wrapped where needed."""
        self.optimizer = optimizer

    @abstractmethod
    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave in every parameter's ``.grad`` what the optimizer is to apply."""

    def clip_groups(self) -> Sequence[ClipGroup]:
        """Tell what ``compute_gradient`` clipped together last, and to which bound each.

        Returns:
            Groups that share out the trainable parameters of ``self.module`` among them: all
            in one, to ``max_grad_norm``, unless a method says otherwise. None where nothing
            is clipped, that is, where the method is not private.
        """
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        return [ClipGroup(trainable, self.experiment.max_grad_norm)]

    def noise_bound(self) -> float:
        """Tell the bound of which the noise was a multiple last: sigma times it.

        It is ``max_grad_norm``, unless the method moves it.
        """
        return self.experiment.max_grad_norm

    def sample_norms(self) -> Tensor | None:
        """Tell the L2 norms of the samples' gradients that ``compute_gradient`` found last.

        Valid until the gradients are cleared.

        Returns:
            Norms before clipping, (B,) over all parameters or (B, groups); None where the
            method does not keep them.
        """
        return None

    def apply_gradient(self) -> None:
        """Let the plain optimizer use the gradients."""
        self.optimizer.step()

    def run(self, batch: Batch, enter: Enter) -> None:
        """Do one whole step: gradient, optimizer, gradients cleared.

        Clearing is left to each library's own default: PyTorch frees gradients, Opacus
        fills them with zeros and frees per-sample gradients.
        """
        self.compute_gradient(batch, enter)
        enter("step")
        self.apply_gradient()
        self.optimizer.zero_grad()

    @property
    def norm_plan(self) -> dict[str, NormChoice] | None:
        """Say which way the norms of each matrix went last, where a method chooses."""
        return None

    @property
    def nonfinite_samples(self) -> int | None:
        """Count the samples that were left out so far, where a method does so."""
        return None

    @property
    def reasons(self) -> dict[str, str]:
        """Say why a figure of the method's own is null, by dotted key of a result."""
        return {}

    def watch_samplers(self, watch: Watch) -> AbstractContextManager[None]:  # noqa: ARG002
        """Watch the steps within: which way each layer takes to what is clipped.

        Args:
            watch: Called in place of each sampler; never, where a method has none.
        """
        return nullcontext()


def mean_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Average the samples' losses; a scalar."""
    return sample_losses(logits_BTV, labels_BT).mean()


def sample_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Average the cross-entropy over the labelled tokens of each sample; (B,).

    A sample without any has the loss 0.
    """
    losses = functional.cross_entropy(
        logits_BTV.flatten(0, 1),
        labels_BT.flatten(),
        ignore_index=UNLABELLED,
        reduction="none",
    )
    labelled_B = (labels_BT != UNLABELLED).sum(1).clamp(min=1)
    return losses.view(labels_BT.shape).sum(1) / labelled_B
