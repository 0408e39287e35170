"""Counts the FLOPs that a user's training loop executes.

It is a dispatch mode like the recorder, but records no memory. Compiled code stays compiled, and an
operator without a formula does not end the training.
"""

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.predict.flops.op_costs import learn_rule


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs of matrix products and attention while it is active.

    It sees operators below autograd and below ``torch.func``. On CUDA, autograd's own thread takes
    over the modes of the thread that called backward (``at::ThreadLocalState``).
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        """FLOPs counted so far."""

        self.unpriced: str | None = None
        """An operator whose FLOPs ``flops`` lacks, and why."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True; otherwise a compiled model that runs here never runs compiled again."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its FLOPs."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self.unpriced = f"{func} does not show what it runs"
            return func(*args, **kwargs)
        rule = learn_rule(func)
        if torch.is_inference_mode_enabled() and not rule.is_counted:
            with self:  # only here do operators that consist of others arrive whole
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if rule.is_counted:
            try:
                flops = rule.count_products(args, kwargs, out)
            except Exception as error:  # noqa: BLE001 (formulas assert what they expect)
                self.unpriced = f"{rule.name}: {error!r}"
            else:
                self.flops += flops or 0
                if flops is None:
                    self.unpriced = f"{rule.name}: no formula is known"
        return out
