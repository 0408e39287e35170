"""What a CUDA graph of a private step rests on, to tell whether it may be replayed.

Kept are the addresses and numbers that a graph has taken in: of every module its mode, its plain
attributes (numbers, texts, flags) and hooks; of every parameter, buffer and state of the optimizer
which object it is, and of the model's where it lies and whether it is trained; C, noise, expected
batch size; every option of the optimizer, but a learning rate that it reads from the device;
autocast and TF32; shapes and dtypes of the batch.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpprof.clipping.optimizer import NoisyOptimizer
from dpprof.norms.float32_products import allows_tf32

_PLAIN = (int, float, bool, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Surroundings(NamedTuple):
    """What a replay needs to be as it was."""

    objects: list[Any]
    """Compared by identity: kept, so that no other object gets the same one."""

    values: list[Any]

    def are_those_of(self, other: "Surroundings | None") -> bool:
        """Tell whether everything is the same."""
        return (
            other is not None
            and len(self.objects) == len(other.objects)
            and all(map(operator.is_, self.objects, other.objects))
            and self.values == other.values
        )


def look_around(optimizer: NoisyOptimizer, batch: Sequence[Tensor]) -> Surroundings:
    """Describe the surroundings of a step on a batch."""
    objects: list[Any] = []
    values: list[Any] = []
    for module in optimizer.clipping.model.modules():
        own = vars(module)
        objects += [module, own.get("forward")]
        values += [(name, one) for name, one in own.items() if one.__class__ in _PLAIN]
        values += [tuple(own.get(hooks) or ()) for hooks in _HOOKS]
        for tensor in (*module._parameters.values(), *module._buffers.values()):  # noqa: SLF001
            if tensor is not None:
                objects.append(tensor)
                values += [tensor.data_ptr(), tensor.requires_grad, tensor.shape, tensor.dtype]
    for state in optimizer.state.values():
        objects += [one for one in state.values() if isinstance(one, Tensor)]
    for group in optimizer.param_groups:
        given = dict(group)
        objects += given.pop("params")
        if takes_rate_on_device(group):
            del given["lr"]
        values += given.items()
    objects += optimizer.generators
    device = batch[0].device.type
    values += [optimizer.settings, torch.is_grad_enabled(), allows_tf32()]
    values += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    values += [(one.shape[1:], one.dtype) for one in batch]
    return Surroundings(objects, values)


def takes_rate_on_device(group: dict[str, Any]) -> bool:
    """Tell whether a group's optimizer takes its learning rate as a number on the device."""
    return "capturable" in group or bool(group.get("fused"))
