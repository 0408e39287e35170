"""Opacus's adaptive clipping: ghost clipping with a bound that follows the norms.

It is not flat clipping, because its bound is not fixed. Source: Andrew et al. 2021,
"Differentially Private Learning with Adaptive Clipping", algorithm 1 and theorem 1. Costs are
those of ``opacus-ghost`` and a few operations on B norms.

Between its two passes, a step counts the samples whose norm is at most the bound C and adds noise
of standard deviation B / 20 to the count. It moves the bound towards the median norm:
C <- C exp(-0.2 (count / B - 0.5)), but never below 1 or above 1e8. These are Opacus's defaults;
``max_grad_norm`` is the first C. Then the step clips to the new bound.

Because the count also uses privacy, the gradient gets more noise: its standard deviation is
C (sigma^-2 - (B / 10)^-2)^(-1/2) instead of sigma C. This does not exist if B <= 10 sigma. With a
noise multiplier of zero, the count still has noise and the gradient has none.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

from opacus.utils.adaptive_clipping import DPTensorFastGradientAdaptiveClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.errors import UnsupportedError
from dpprof.private.substitutes import substitute
from dpprof.subjects.methods.opacus.two_pass import OpacusTwoPass
from dpprof.subjects.methods.training_step import Batch, ClipGroup, Enter

_BOUNDS_DIFFER = (
    "with Opacus's adaptive clipping each rank moves a bound of its own, and noise that is scaled "
    "by rank 0's does not cover a larger one"
)
"""Opacus 1.6.0 sums the counts of all ranks only if the module is DDP's, but it is Opacus's wrapper
of that. A test fails once Opacus is fixed.
"""


class _AdaptiveLoss(DPTensorFastGradientAdaptiveClipping):
    """Opacus's loss, made to work under fake tensors too."""

    def _update_clip_and_noise(self, per_sample_norms: Tensor) -> tuple[float, float]:
        # Opacus reads the noisy count and the new bound as numbers. They affect no shape, so any
        # number will do where fake tensors have none.
        fake = isinstance(per_sample_norms, FakeTensor)
        with substitute(Tensor, "item", lambda _: 1.0) if fake else nullcontext():
            updated: tuple[float, float] = super()._update_clip_and_noise(per_sample_norms)
        return updated


class _AdaptiveCriterion(DPLossFastGradientClipping):
    """Replaces ``DPLossFastGradientAdaptiveClipping``, which in Opacus 1.6.0 clips no sample.

    That class requires a criterion that reduces over samples, and then treats its result as the
    losses of samples, so it weights the mean loss as a whole. A test fails once Opacus is fixed.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> _AdaptiveLoss:
        loss = super().__call__(*args, **kwargs)
        return _AdaptiveLoss(
            self.module,
            self.optimizer,
            loss.loss_per_sample,
            self.loss_reduction,
            initial_noise_multiplier=self.optimizer.noise_multiplier,
        )


class OpacusAdaptive(OpacusTwoPass):
    """``grad_sample_mode="ghost"`` with what ``PrivacyEngineAdaptiveClipping`` adds.

    Formal guarantees: given the noisy count, the sum before noise has L2 sensitivity C under
    adding or removing one sample, where C is the step's own bound. Count and sum together are as
    private as one sum with bound C and noise sigma C (theorem 1).

    Raises:
        UnsupportedError: In a step whose batch has at most 10 sigma samples.
    """

    mechanism: ClassVar[str] = "adaptive flat clipping"
    accumulates = False  # each batch would move the bound
    parallel_kinds = ()
    unsupported_ranks: ClassVar = dict.fromkeys(("ddp", "fsdp"), _BOUNDS_DIFFER)
    use_ghost_clipping = True
    criterion_type = _AdaptiveCriterion

    @classmethod
    def smallest_batch_size(cls, experiment: Experiment) -> int:
        """Return the least batch that can pay for the count: more than 10 sigma samples."""
        # No batch is as large as sys.maxsize, and infinity is no integer.
        return int(min(10 * experiment.noise_multiplier, sys.maxsize)) + 1

    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``."""
        if len(batch.x) < self.smallest_batch_size(self.experiment):
            raise UnsupportedError(
                f"Opacus's adaptive clipping takes batches of more than 10 x noise_multiplier = "
                f"{10 * self.experiment.noise_multiplier:g} samples, and this one has "
                f"{len(batch.x)}"
            )
        super().compute_gradient(batch, enter)

    def clip_groups(self) -> Sequence[ClipGroup]:
        """Return one group with the bound to which the step clipped; Opacus adds no epsilon."""
        (group,) = super().clip_groups()
        return [group._replace(bound=self.noise_bound(), epsilon=0.0)]

    def noise_bound(self) -> float:
        """Return the bound to which the step clipped, which also scales its noise."""
        return float(self.optimizer.max_grad_norm)
