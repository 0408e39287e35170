"""Opacus's adaptive clipping: ghost clipping with a bound that follows the norms.

Another mechanism than flat clipping at a fixed bound. Source: Andrew et al. 2021,
"Differentially Private Learning with Adaptive Clipping", algorithm 1 and theorem 1. Costs are
those of ``opacus-ghost``; moving the bound takes a few operations on B norms.

Between its passes a step counts the samples whose norm is within the bound C, adds noise of
standard deviation B / 20 to the count, and moves the bound towards the median norm:
C <- C exp(-0.2 (count / B - 0.5)), but never below 1 or above 1e8. Those are Opacus's
defaults; C is ``max_grad_norm`` in the beginning only. The step then clips to its new bound.

The count spends some of the privacy, and noise on the gradient pays for it: its standard
deviation is C (sigma^-2 - (B / 10)^-2)^(-1/2), more than sigma C, and there is none where
B <= 10 sigma. With a noise multiplier of zero the gradient has no noise, the count still has.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

from opacus.utils.adaptive_clipping import DPTensorFastGradientAdaptiveClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.methods.opacus.two_pass import OpacusTwoPass
from dpprof.methods.training_step import Batch, ClipGroup, Enter
from dpprof.spec.registry import UnsupportedError
from dpprof.system.substitutes import substitute


class _AdaptiveLoss(DPTensorFastGradientAdaptiveClipping):
    """Opacus's loss, which moves the bound under fake tensors too."""

    def _update_clip_and_noise(self, per_sample_norms: Tensor) -> tuple[float, float]:
        # The noise on the count and the new bound become numbers, which decide no shape: where
        # tensors have no elements, any numbers will do. Opacus asks the tensors themselves.
        fake = isinstance(per_sample_norms, FakeTensor)
        with substitute(Tensor, "item", lambda _: 1.0) if fake else nullcontext():
            found: tuple[float, float] = super()._update_clip_and_noise(per_sample_norms)
        return found


class _AdaptiveCriterion(DPLossFastGradientClipping):
    """Opacus's loss of each sample, made into one that adapts.

    Stands for ``DPLossFastGradientAdaptiveClipping``, which in Opacus 1.6.0 takes what the
    criterion returns for losses of samples, though it makes sure that the criterion reduces
    them: the mean loss is then weighted as a whole, and no sample is clipped. A test tells
    when this can go.
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
    adding or removing one sample, C being the step's own bound; count and sum together are as
    private as one sum at bound C with noise sigma C (theorem 1).

    Raises:
        UnsupportedError: In a step whose batch has no more than 10 sigma samples.
    """

    mechanism: ClassVar[str] = "adaptive flat clipping"
    use_ghost_clipping = True
    criterion_type = _AdaptiveCriterion

    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``."""
        sigma = self.experiment.noise_multiplier
        if len(batch.tokens_BT) <= 10 * sigma:
            raise UnsupportedError(
                f"Opacus's adaptive clipping takes batches of more than 10 x noise_multiplier = "
                f"{10 * sigma:g} samples, and this one has {len(batch.tokens_BT)}"
            )
        super().compute_gradient(batch, enter)

    def clip_groups(self) -> Sequence[ClipGroup]:
        """Tell the bound to which the step moved before it clipped; nothing is added to norms."""
        (group,) = super().clip_groups()
        return [group._replace(bound=self.noise_bound(), epsilon=0.0)]

    def noise_bound(self) -> float:
        """Tell the bound to which the step moved; its optimizer scales the noise by the same."""
        return float(self.optimizer.max_grad_norm)
