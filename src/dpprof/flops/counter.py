"""FLOPs that a stretch of somebody's training executes, and nothing else of it.

A dispatch mode like the recorder, for loops that dpprof knows nothing of: it follows no memory,
leaves compiled code compiled, and ends no training over an operator that it cannot price.
"""

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.flops.op_costs import Rule, learn_rule


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs of matrix products and attention while it is active.

    It sees operators below autograd and below ``torch.func``. On CUDA, backward runs on a thread
    of autograd's own, which takes over the state of the thread that called it
    (``at::ThreadLocalState``), modes included; ``FlopCounterMode`` rests on that too.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        """FLOPs counted so far."""

        self.unpriced: str | None = None
        """An operator that could not be priced, and why: ``flops`` then lacks something."""

        self._rules: dict[Any, Rule] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Say yes, or a model of ``torch.compile`` that is met here never runs compiled again."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count its FLOPs."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self.unpriced = f"{func} does not show what it runs"
            return func(*args, **kwargs)
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = learn_rule(func)
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
