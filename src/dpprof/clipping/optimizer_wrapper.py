"""An optimizer around another one, with the interface of Opacus's optimizers.

Opacus's accountants, noise schedulers and ``BatchMemoryManager`` work with it, and PyTorch's
learning rate schedulers. It needs no Opacus, which takes as long to import as PyTorch.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class OptimizerWrapper(Optimizer):
    """Steps another optimizer, with its parameters and its state, once a gradient is made private.

    Args:
        optimizer: The optimizer to step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Without that of Optimizer: groups, state and defaults are those of the other.
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
        groups = self.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The other's groups of parameters."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The other's state."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The other's defaults."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the other's state as a dictionary."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the other's state."""
        self.original_optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return repr(self.original_optimizer)
