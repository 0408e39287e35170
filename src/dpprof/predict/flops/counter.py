"""Counts the FLOPs that a training loop executes, and those that its model needs."""

from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.predict.flops.op_costs import learn_rule
from dpprof.subjects.models.quantized import count_elements


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


def model_flops_per_token(module: nn.Module, *, seq_len: int, layers: int, d_model: int) -> int:
    """Return the FLOPs that a step of a dense transformer needs for each token, forward and back.

    6 N + 12 L d T (Chowdhery et al. 2022, "PaLM", appendix B): a weight takes a product forward and
    two backward, two FLOPs each, and L layers of attention of width d over T tokens take six
    products of 2 d T. A causal mask is not discounted, nor is anything that is computed again.

    N counts the elements of matrices, shared ones once, without embedding tables. A frozen matrix
    costs 4 and not 6: only its input's gradient is computed. Below the first trained layer that is
    too much, as no gradient is computed there. The formula does not hold for mixtures of
    experts and for convolutions.

    Args:
        module: The model; what requires a gradient must be settled.
        seq_len: Tokens that attend to one another, T.
        layers: Layers with attention, L.
        d_model: Their width, d: heads times the width of a head.
    """
    weights = {
        parameter
        for layer in module.modules()
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        for parameter in layer.parameters(recurse=False)
        if parameter.dim() > 1
    }
    products = sum((6 if p.requires_grad else 4) * count_elements(p) for p in weights)
    return products + 12 * layers * d_model * seq_len
