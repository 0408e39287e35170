"""What a CUDA graph of a private step rests on, to tell whether it may be replayed.

Kept are the addresses and numbers that a graph has taken in: of every module its class, its mode,
its plain attributes (numbers, texts, flags), its tensors, its hooks and its patch; of every
parameter, buffer and state of the optimizer which object it is, and of the model's where it lies
and whether it is trained; C, noise, expected batch size; every option and hook of the optimizer,
but a learning rate that it reads from the device; autocast and TF32; shapes and dtypes of the
batch.
"""

import copy
import importlib
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from dpprof.private.layers.patching import patch_of
from dpprof.private.noise.optimizer import HOOK, NoisyOptimizer
from dpprof.private.norms.float32_products import allows_tf32

_PLAIN = (int, float, bool, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_ON_DEVICE = (Adam, AdamW, SGD)
"""Optimizers whose state is tensors that each step writes in place. Others count steps in Python or
on the host, or make new tensors."""


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
        objects += [module, type(module), own.get("forward"), patch_of(module)]
        values += [(name, one) for name, one in own.items() if one.__class__ in _PLAIN]
        values += [tuple(own.get(hooks) or ()) for hooks in _HOOKS]
        attributes = (one for one in own.values() if isinstance(one, Tensor))
        for tensor in (*module._parameters.values(), *module._buffers.values(), *attributes):  # noqa: SLF001
            if tensor is not None:
                objects.append(tensor)
                values += [tensor.data_ptr(), tensor.requires_grad, tensor.shape, tensor.dtype]
    if may_capture_step(optimizer):
        for state in optimizer.state.values():
            objects += [one for one in state.values() if isinstance(one, Tensor)]
    for group in optimizer.param_groups:
        objects += group["params"]
    objects.append(getattr(optimizer.original_optimizer, HOOK, None))
    values += describe_options(optimizer)
    objects += optimizer.keys.on_devices
    device = batch[0].device.type
    values += [optimizer.settings, torch.is_grad_enabled(), allows_tf32()]
    values += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    values += [(one.shape[1:], one.dtype) for one in batch]
    return Surroundings(objects, values)


def describe_options(optimizer: NoisyOptimizer) -> list[Any]:
    """Describe what a captured step of an optimizer rests on beside its tensors."""
    described: list[Any] = [tuple(hooks) for hooks in _hooks_of_steps(optimizer)]
    for group in optimizer.param_groups:
        for name, one in group.items():
            if name != "params" and not (name == "lr" and takes_rate_on_device(group)):
                # Tensors by identity: to compare their numbers would wait for the device.
                is_number = not isinstance(one, Tensor)
                described.append((name, copy.copy(one) if is_number else id(one)))
    return described


def _hooks_of_steps(optimizer: NoisyOptimizer) -> list[Any]:
    module = importlib.import_module("torch.optim.optimizer")
    own = optimizer.original_optimizer
    return [getattr(own, name) for name in _OF_STEPS] + [getattr(module, name) for name in _GLOBAL]


def may_capture_step(optimizer: NoisyOptimizer) -> bool:
    """Tell whether an optimizer's step does nothing in Python that a replay would leave out."""
    pre_hooks, *others = _hooks_of_steps(optimizer)
    return (
        type(optimizer.original_optimizer) in _ON_DEVICE
        and len(pre_hooks) == 1  # which refuses a step without noise
        and not any(others)
        and not any(
            isinstance(one, Tensor)
            for group in optimizer.param_groups
            for one in _numbers_of(group)
        )
    )


def _numbers_of(group: dict[str, Any]) -> list[Any]:
    betas = group.get("betas", ())
    return [group["lr"], *betas]


def takes_rate_on_device(group: dict[str, Any]) -> bool:
    """Tell whether a group's optimizer can take its learning rate as a number on the device."""
    is_number = isinstance(group["lr"], int | float)
    return is_number and ("capturable" in group or bool(group.get("fused")))
