"""What makes a user's loop private, and the step of an ordinary loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from opacus.optimizers import AdaClipDPOptimizer
from torch import Tensor, nn

from dpprof.clipping.engine import Clipping
from dpprof.clipping.optimizer import NoisyOptimizer
from dpprof.verification.training_loop import Mechanism, PrivateOptimizer


@contextmanager
def completed(clipping: Clipping, model: nn.Module) -> Iterator[NoisyOptimizer]:
    """Give a clipping an optimizer without noise, inside the context.

    An optimizer of its own may be in the middle of a batch in parts: the sums of those are kept.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sums = [getattr(parameter, "summed_grad", None) for parameter in trained]
    try:
        yield NoisyOptimizer(
            torch.optim.SGD(trained, lr=1.0), clipping, noise_multiplier=0.0, expected_batch_size=1
        )
    finally:
        for parameter, summed in zip(trained, sums, strict=True):
            vars(parameter)["summed_grad"] = summed


def refuse_unknown(private: Any, step: Any) -> None:
    """Refuse what does not say how a loop is private.

    Raises:
        TypeError: It is none of the kinds that are known, or its bound adapts.
        ValueError: A loop by hand has no step.
    """
    if not isinstance(private, PrivateOptimizer | Mechanism):
        raise TypeError(
            "private must be an optimizer of Opacus, dpprof's NoisyOptimizer, a Clipping or a "
            f"Mechanism, and is a {type(private).__name__}"
        )
    if isinstance(private, AdaClipDPOptimizer):
        raise TypeError("private must clip to a fixed bound, and adapts it")
    if isinstance(private, Mechanism) and step is None:
        raise ValueError("a Mechanism describes a loop by hand; give the loop's step as step")


def ordinary_step(
    model: nn.Module, loss: Callable[..., Any], private: PrivateOptimizer | Mechanism
) -> Callable[..., None]:
    """Return the step of an ordinary loop with a loss and an optimizer, on a batch's tensors."""
    assert isinstance(private, PrivateOptimizer)

    def step(*batch: Tensor, **named: Tensor) -> None:
        private.zero_grad()
        value = loss(model, *batch, **named)
        if isinstance(private, NoisyOptimizer):
            private.clipping.backward(value)
        elif isinstance(value, Tensor) and value.dim():
            torch.autograd.backward(
                value.mean() if private.loss_reduction == "mean" else value.sum()
            )
        else:
            value.backward()
        private.step()

    return step
