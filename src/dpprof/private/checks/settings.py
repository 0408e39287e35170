"""Reads what a loop is set to: its bounds, its noise, and what its sums are divided by."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from torch import nn
from torch.optim import Optimizer

from dpprof.private.loop import private_optimizer
from dpprof.private.noise.noise_keys import NoiseKeys
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.samples.company import WrongTrainingError

PrivateOptimizer: TypeAlias = DPOptimizer | NoisyOptimizer  # with the same interface


class Mechanism(NamedTuple):
    """The settings of a loop that is written by hand, without a private optimizer."""

    optimizer: Optimizer
    max_grad_norm: float
    noise_multiplier: float
    expected_batch_size: float
    """The divisor of the noisy sum; 1 for none."""


class Settings:
    """The settings of a private optimizer, or of a loop by hand; ``hooks`` are Opacus's."""

    def __init__(
        self,
        private: PrivateOptimizer | Mechanism,
        trained: list[nn.Parameter],
        hooks: Sequence[Any],
    ) -> None:
        self._private, self._trained, self._hooks = private, trained, hooks
        self.clipping = private.clipping if isinstance(private, NoisyOptimizer) else None
        optimizer: Any = private.optimizer if isinstance(private, Mechanism) else private
        while isinstance(optimizer, PrivateOptimizer):
            optimizer = optimizer.original_optimizer
        self.optimizer: Optimizer = optimizer  # the innermost one
        self.is_correlated = getattr(private, "buffers", None) is not None
        """Whether a step's noise takes back that of earlier ones."""

    @property
    def keys(self) -> NoiseKeys | None:
        """The keys of the noise of dpprof's optimizer; None for another optimizer."""
        return self._private.keys if isinstance(self._private, NoisyOptimizer) else None

    @property
    def has_parts(self) -> bool:
        """Whether the optimizer is from ``make_private``, and knows the parts of batches."""
        return isinstance(self._private, private_optimizer.PrivateOptimizer)

    @property
    def optimized(self) -> list[nn.Parameter]:
        """The parameters that the optimizer has."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def averages(self) -> bool:
        """Whether the loss of a batch is a mean, and the sum of gradients is divided."""
        return getattr(self._private, "loss_reduction", "mean") == "mean"

    @property
    def divisor(self) -> float:
        """The divisor of the sum of clipped gradients."""
        size = self._private.expected_batch_size if self.averages else 1
        assert size is not None
        return float(size)

    @property
    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Parameters that are clipped together, and the bound of each group."""
        if self.clipping is not None:
            return self.clipping.groups
        bounds = getattr(self._private, "max_grad_norms", None)
        if bounds is not None:
            return [([p], float(limit)) for p, limit in zip(self.optimized, bounds, strict=True)]
        return [(self._trained, float(self._private.max_grad_norm))]

    @property
    def factor(self) -> dict[str, Any]:
        """What ``clip`` is told of another factor than that of flat clipping."""
        clipping = self.clipping
        if clipping is None:
            return {}
        return {"stability": clipping.stability, "psac": clipping.is_psac}

    @property
    def noise(self) -> float:
        """The standard deviation of the noise in the gradients that the optimizer is given."""
        private = self._private
        return float(private.noise_multiplier * private.max_grad_norm) / self.divisor

    def bounds_times(self, factor: float) -> AbstractContextManager[None]:
        """Multiply every bound inside the context."""
        bounds: list[tuple[Any, str, Any]] = [
            (holder, "max_grad_norm", holder.max_grad_norm * factor)
            for holder in (self._private, *self._hooks)
            if hasattr(holder, "max_grad_norm")
        ]
        several = getattr(self._private, "max_grad_norms", None)
        if several is not None:
            bounds.append((self._private, "max_grad_norms", [bound * factor for bound in several]))
        return setting(*bounds)

    def verify(self, names: Mapping[nn.Parameter, str]) -> None:
        """Refuse an optimizer with other parameters than the model's, and bounds that differ."""
        optimized = set(self.optimized)
        if not self._trained:
            raise WrongTrainingError("no parameter of the model requires a gradient")
        for parameter in self._trained:
            if parameter not in optimized:
                raise WrongTrainingError(
                    f"{names[parameter]} is trained, and the optimizer does not have it"
                )
        for parameter in self.optimized:
            if parameter not in names:
                raise WrongTrainingError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have"
                )
        for hooks in self._hooks:
            bound = getattr(hooks, "max_grad_norm", self._private.max_grad_norm)
            if not math.isclose(bound, self._private.max_grad_norm, rel_tol=1e-6):
                raise WrongTrainingError(
                    f"samples are clipped to a bound of {bound:g}, and the noise is for one of "
                    f"{self._private.max_grad_norm:g}"
                )


@contextmanager
def setting(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes of objects, also properties, inside the context."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def refuse_unknown(private: Any, step: Any) -> None:
    """Refuse an argument that does not say how a loop is private, or a loop by hand and no step."""
    if not isinstance(private, PrivateOptimizer | Mechanism):
        raise TypeError(
            "private must be an optimizer of Opacus, dpprof's NoisyOptimizer, a Clipping or a "
            f"Mechanism, and is a {type(private).__name__}"
        )
    if isinstance(private, AdaClipDPOptimizer):
        raise TypeError("private must clip to a fixed bound, and adapts it")
    if isinstance(private, Mechanism) and step is None:
        raise ValueError("a Mechanism describes a loop by hand; give the loop's step as step")
