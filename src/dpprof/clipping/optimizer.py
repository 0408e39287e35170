"""Opacus's noise, averaging and accounting for gradients that are clipped already."""

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import _generate_noise


class NoisyOptimizer(DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """Adds noise to the sums that a ``Clipping`` left in ``.grad``, then steps.

    It is Opacus's optimizer in everything: noise of standard deviation
    ``noise_multiplier * max_grad_norm`` from its generator, division by
    ``expected_batch_size``, step hooks for its accountants, steps that are skipped to
    accumulate. Only what is kept in between differs: sums are noised in place, in place
    of a copy each for ``.grad``, ``.summed_grad`` and their sum.

    Args are those of ``opacus.optimizers.DPOptimizer``; ``expected_batch_size`` is that of
    Poisson sampling, whatever a batch really has.
    """

    def accumulate(self) -> None:
        """Take what clipping left, in addition to what skipped steps did."""
        for parameter in self.params:
            if parameter.grad is None:
                if parameter.summed_grad is None:  # a batch without samples
                    parameter.summed_grad = torch.zeros_like(parameter)
            elif parameter.summed_grad is None:
                parameter.summed_grad = parameter.grad
            else:
                parameter.summed_grad += parameter.grad
            parameter.grad = None

    def add_noise(self) -> None:
        """Add noise to the sums, and make gradients of them."""
        for parameter in self.params:
            summed, parameter.summed_grad = parameter.summed_grad, None
            summed += _generate_noise(
                std=self.noise_multiplier * self.max_grad_norm,
                reference=summed,
                generator=self.generator,
                secure_mode=self.secure_mode,
            )
            parameter.grad = summed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free gradients, as PyTorch does, and what steps that were not skipped summed."""
        super().zero_grad(set_to_none)
