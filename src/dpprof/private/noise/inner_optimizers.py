"""Refuses optimizers that noise cannot be put inside of.

A ``NoisyOptimizer`` puts noise into ``.grad`` once for each batch, and then calls ``step()`` of the
optimizer inside once, without a closure. An optimizer that runs the model again, steps twice, or
reads the model otherwise than by ``.grad`` uses gradients without noise, or would step on nothing.
What wraps another optimizer goes around the ``NoisyOptimizer``: what it does with parameters after
``step()`` only processes what has noise.
"""

import ast
import inspect
import textwrap
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpprof.private.engine.engine import Clipping
from dpprof.private.noise.schedules import NOISY

_METHODS = {
    "first_step": "takes two steps for each batch (first_step, second_step)",
    "second_step": "takes two steps for each batch (first_step, second_step)",
    **dict.fromkeys(
        ("update_hessian", "set_hessian", "zero_hessian", "get_trace"),
        "reads second derivatives of the loss",
    ),
}
"""By methods that only such optimizers have: sharpness-aware ones, Sophia, AdaHessian."""


def refuse_optimizer(optimizer: Any) -> None:
    """Refuse to put noise inside of an optimizer whose ``step()`` alone is not its whole step.

    ``ValueError``: it is no optimizer, wraps another one, needs a closure, takes two steps,
    reads second derivatives, or holds the model.
    """
    name = type(optimizer).__name__
    what = None
    if not isinstance(optimizer, Optimizer):
        what = "is not a torch.optim.Optimizer; give the one whose step() changes the parameters"
    elif (inside := _find_held(optimizer, Optimizer)) is not None:
        what = (
            f"wraps an optimizer ({inside}); give that one, and put {name} around the "
            "NoisyOptimizer if it only changes parameters after step()"
        )
    elif not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        what = "did not call Optimizer.__init__, so its steps cannot be watched; let it do so"
    elif (
        method := next((name for name in _METHODS if hasattr(optimizer, name)), None)
    ) is not None:
        what = f"{_METHODS[method]}, and only gradients of one backward have noise; use another one"
    elif _needs_closure(optimizer):
        what = "computes losses and gradients again in its step (closure); use another one"
    elif (held := _find_held(optimizer, nn.Module)) is not None:
        what = f"holds a model ({held}), which it reads without noise; use another one"
    if what is not None:
        raise ValueError(f"{name} {what}")


def _find_held(optimizer: Optimizer, kind: type) -> str | None:
    """Return the name of an attribute that is of a kind, or a list or dictionary with one."""
    for name, value in vars(optimizer).items():
        if name in (NOISY, "state", "param_groups"):  # state has parameters for keys
            continue
        held = value.values() if isinstance(value, dict) else value
        several = held if isinstance(value, dict | list | tuple) else [value]
        if any(isinstance(part, kind) for part in several):
            return name
    return None


def _needs_closure(optimizer: Optimizer) -> bool:
    """Tell whether ``step`` has no default for its closure, or asserts that there is one."""
    step = inspect.unwrap(type(optimizer).step)
    _, *arguments = inspect.signature(step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [argument for argument in arguments if argument.kind in kinds]
    if any(argument.default is argument.empty for argument in positional):
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(step)))
    except (OSError, TypeError, SyntaxError):  # its source is not there
        return False
    names = {argument.name for argument in positional}
    return any(
        names & {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.If) and any(isinstance(line, ast.Raise) for line in node.body))
    )


def refuse_other_parameters(optimizer: Optimizer, clipping: Clipping) -> None:
    """Refuse an optimizer of other parameters than a clipping clips (``ValueError``)."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.requires_grad and not clipping.clips(parameter):
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model "
                "does not train; make the optimizer last, once the model is as it is trained"
            )
    there = set(parameters)
    for parameter in clipping.parameters:
        if parameter not in there:
            raise ValueError(
                f"{clipping.name_of(parameter)} is trained, and the optimizer does not have it; "
                "add it to that, or to one of several, or freeze it"
            )
