"""Recognises losses that contain a gradient of the model, such as a gradient penalty.

``torch.autograd.grad(..., create_graph=True)`` runs the backward of layers inside of the loss. What
they contribute then belongs to nobody: the loss uses gradients of inputs. ``backward`` of a
clipping differentiates that computation again, and its rules contribute as in any forward.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from dpprof.private.errors import UnsupportedError

_INSTEAD = (
    "take a finite difference of the model's outputs, or compute the gradient without create_graph "
    "and with detach(), so that it counts as a number"
)


DIFFERENTIATED_AGAIN = (
    "clipping differentiates linear layers, convolutions, and layer, group, instance and RMS norms "
    "again, and no others"
)


def computes_gradients(
    contributions: Iterable[tuple[nn.Parameter, Any]], name_of: Callable[[nn.Parameter], str]
) -> bool:
    """Tell whether backward computes gradients of parameters; refuse ``torch.autograd.grad``."""
    own = {id(parameter): parameter for parameter, _ in contributions}
    # Neither has a public name.
    node = torch._C._current_autograd_node() if own else None  # noqa: SLF001
    for leaf, _ in () if node is None else node.next_functions:
        parameter = own.get(id(getattr(leaf, "variable", None)))
        if leaf is None or parameter is None:
            continue
        try:
            if torch._C._will_engine_execute_node(leaf):  # noqa: SLF001
                return True
        except RuntimeError as error:
            raise UnsupportedError(
                f"torch.autograd.grad was asked for a gradient of {name_of(parameter)}, which is "
                "clipped: a loss that contains a gradient of a trained parameter has no per-sample "
                f"gradients here; {_INSTEAD}, or freeze the parameter before it is clipped"
            ) from error
    return False


def refuse_gradient(name: str, kind: str, problem: str) -> None:
    """Refuse a loss with a gradient that went through a layer, of a name, a class and a problem."""
    raise UnsupportedError(
        "the loss contains a gradient of the model (create_graph=True), which goes through "
        f"{name}, a {kind}: {problem}; {_INSTEAD}, or freeze the layer before it is clipped"
    )


def refuse_transforms(layer: nn.Module) -> None:
    """Refuse a clipped layer inside of a transform of ``torch.func`` (``UnsupportedError``)."""
    interpreter = torch._C._functorch.peek_interpreter_stack()  # noqa: SLF001 (no public name)
    if interpreter is not None:
        transform = f"torch.func.{interpreter.key().name.lower()}"
    elif forward_ad._current_level >= 0:  # noqa: SLF001
        transform = "torch.autograd.forward_ad"
    else:
        return
    raise UnsupportedError(
        f"{type(layer).__name__} is clipped, and runs inside of {transform}, which clipping does "
        "not see through; for a loss that contains a gradient of inputs use torch.autograd.grad("
        "..., create_graph=True), for several inputs one call with a batch of them"
    )
