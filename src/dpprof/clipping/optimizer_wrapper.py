"""An optimizer around another one, with the interface of Opacus's optimizers.

Opacus's accountants, noise schedulers and ``BatchMemoryManager`` work with it, and PyTorch's
learning rate schedulers. It needs no Opacus, which takes as long to import as PyTorch.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def _of_the_original(name: str, doc: str) -> property:
    """Return a property that is an attribute of the original optimizer."""

    def read(wrapper: "OptimizerWrapper") -> Any:
        return getattr(wrapper.original_optimizer, name)

    def write(wrapper: "OptimizerWrapper", value: Any) -> None:
        setattr(wrapper.original_optimizer, name, value)

    return property(read, write, doc=doc)


class OptimizerWrapper(Optimizer):
    """Steps another optimizer, with its parameters and its state, once a gradient is made private.

    Args:
        optimizer: The optimizer to step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Optimizer's own is not called: groups, state and defaults are those of the original.
        self.original_optimizer = optimizer
        self.step_hook: Callable[[Any], None] | None = None
        self._step_skip_queue: list[bool] = []
        self._is_last_step_skipped = False
        for parameter in self.params:
            parameter.summed_grad = None

    @abstractmethod
    def accumulate(self) -> None:
        """Add the gradients of a batch, or of a part of one, to ``.summed_grad``."""

    @abstractmethod
    def add_noise(self) -> None:
        """Make ``.grad`` of ``.summed_grad``: private and averaged."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the gradient private and step, unless this step is to be skipped."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.accumulate()
        self._is_last_step_skipped = bool(self._step_skip_queue) and self._step_skip_queue.pop(0)
        if self._is_last_step_skipped:
            return None
        self.add_noise()
        if self.step_hook is not None:
            self.step_hook(self)
        return self.original_optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free gradients as PyTorch does; sums survive only a skipped step."""
        if not self._is_last_step_skipped:
            for parameter in self.params:
                parameter.summed_grad = None
        self.original_optimizer.zero_grad(set_to_none)

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """Call a function with this optimizer before each step, as accountants ask for."""
        self.step_hook = fn

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Queue whether a coming step only accumulates: all but the last of a batch in parts."""
        self._step_skip_queue.append(do_skip)

    @property
    def accumulated_iterations(self) -> int:
        """How many batches a step counts as, for accountants."""
        return 1

    @property
    def params(self) -> list[Any]:
        """The parameters that are trained, each with an attribute ``summed_grad``."""
        return [p for p in self.every_parameter if p.requires_grad]

    @property
    def every_parameter(self) -> list[Any]:
        """The parameters of the original optimizer, with those that are frozen."""
        return [p for group in self.param_groups for p in group["params"]]

    param_groups: Any = _of_the_original("param_groups", "The original optimizer's groups.")
    state: Any = _of_the_original("state", "The original optimizer's state.")
    defaults: Any = _of_the_original("defaults", "The original optimizer's defaults.")

    def state_dict(self) -> dict[str, Any]:
        """Return the original optimizer's state as a dictionary."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the original optimizer's state."""
        self.original_optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return repr(self.original_optimizer)
