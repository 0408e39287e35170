"""Describes what a CUDA graph of a private step rests on, to tell whether it may be replayed.

These are the objects, addresses and numbers that a graph has taken in:

* of every module its class, mode, plain attributes (numbers, texts, flags), hooks and patch;
* every parameter, buffer and other tensor of the model, where it lies, and whether it is trained;
* C, noise and expected batch size;
* the optimizer's state, and its options and hooks, but for learning rates, which it reads from the
  device, or steps with in Python;
* the code of the function that computes losses, and the variables that it names;
* autocast and TF32; shapes and dtypes of the batch.
"""

import copy
import dis
import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CellType, CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from dpprof.private.layers.patching import patch_of
from dpprof.private.noise.optimizer import HOOK, NoisyOptimizer
from dpprof.private.norms.float32_products import allows_tf32
from dpprof.private.refusals.calls import is_setting, read_settings

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_EMPTY = CellType()
_ON_DEVICE = (Adam, AdamW, SGD)
"""Optimizers whose state is tensors that each step writes in place. Others count steps in Python or
on the host, or make new tensors."""


class Surroundings(NamedTuple):
    """What must be as it was for a replay."""

    objects: list[Any]  # compared by identity, and kept, so that no other object gets it
    values: list[Any]

    def are_those_of(self, other: "Surroundings | None") -> bool:
        """Tell whether everything is the same."""
        return (
            other is not None
            and len(self.objects) == len(other.objects)
            and all(map(operator.is_, self.objects, other.objects))
            and self.values == other.values
        )


def look_around(
    optimizer: NoisyOptimizer, losses_of: Callable[..., Tensor], batch: Sequence[Tensor]
) -> Surroundings:
    """Describe the surroundings of a step on a batch, whose losses a function computes."""
    objects: list[Any] = [optimizer.clipping.sums.owner]
    everywhere = importlib.import_module("torch.nn.modules.module")
    values: list[Any] = [tuple(getattr(everywhere, f"_global{hooks}")) for hooks in _HOOKS]
    device = next(optimizer.clipping.model.parameters()).device.type
    is_on_gpu = device == "cuda"
    for module in optimizer.clipping.model.modules():
        own = vars(module)
        objects += [module, type(module), own.get("forward"), patch_of(module)]
        values += read_settings(vars(module)).items()
        values += [tuple(own.get(hooks) or ()) for hooks in _HOOKS]
        objects += [value for value in own.values() if callable(value)]
        attributes = [value for value in own.values() if isinstance(value, Tensor)]
        for tensor in (*module._parameters.values(), *module._buffers.values(), *attributes):  # noqa: SLF001
            if tensor is not None:
                objects.append(tensor)
                values += [tensor.data_ptr(), tensor.requires_grad, tensor.shape, tensor.dtype]
                values.append(tensor.stride())
                if is_on_gpu and tensor.is_cpu and tensor.numel() == 1:
                    values.append(tensor.item())  # a graph takes the number in
    if may_capture_step(optimizer):
        for state in optimizer.state.values():
            objects += [value for value in state.values() if isinstance(value, Tensor)]
    for group in optimizer.param_groups:
        objects += group["params"]
        values.append(len(group["params"]))
    objects.append(vars(optimizer.original_optimizer).get("step"))
    objects.append(getattr(optimizer.original_optimizer, HOOK, None))
    values += describe_options(optimizer, with_rates=False)
    objects += optimizer.keys.on_devices
    for variable in _read_by(losses_of):
        (values if is_setting(variable) else objects).append(variable)
    values += [optimizer.settings, torch.is_grad_enabled(), allows_tf32()]
    values += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    values += [(tensor.shape[1:], tensor.dtype) for tensor in batch]
    return Surroundings(objects, values)


def _read_by(function: Any) -> Iterator[Any]:
    """List the code of a function, and the variables that it names: its own, and global ones."""
    if isinstance(function, partial):
        for part in (function.func, *function.args):
            yield from _read_by(part)
        for name in sorted(function.keywords):
            yield from (name, function.keywords[name])
    elif inspect.ismethod(function):
        yield function.__self__
        for named in read_settings(getattr(function.__self__, "__dict__", {})).items():
            yield from named
        yield from _read_by(function.__func__)
    elif inspect.isfunction(function):
        yield function.__code__
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for cell in function.__closure__ or ():
            yield cell.cell_contents if cell != _EMPTY else None
        names = _names_in(function.__code__)
        yield from (function.__globals__[name] for name in names if name in function.__globals__)
    else:
        yield function


@functools.cache
def _names_in(code: CodeType) -> tuple[str, ...]:
    """Return the global variables that code reads, and functions within it."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return (*own, *(name for const in inner for name in _names_in(const)))


def describe_options(optimizer: NoisyOptimizer, *, with_rates: bool = True) -> list[Any]:
    """Describe the options and hooks on which a captured step of an optimizer rests.

    Learning rates that it reads from the device are left out; without ``with_rates`` all that are
    numbers, because what comes before the step does not depend on them.
    """
    described: list[Any] = [tuple(hooks) for hooks in _hooks_of_steps(optimizer)]
    for group in optimizer.param_groups:
        is_free = takes_rate_on_device(group) or not with_rates
        for name, value in group.items():
            # Tensors by identity: to compare their numbers would wait for the device.
            is_number = not isinstance(value, Tensor)
            if name != "params" and not (name == "lr" and is_free and is_number):
                described.append((name, copy.copy(value) if is_number else id(value)))
    return described


def _hooks_of_steps(optimizer: NoisyOptimizer) -> list[Any]:
    module = importlib.import_module("torch.optim.optimizer")
    own = optimizer.original_optimizer
    return [getattr(own, name) for name in _OF_STEPS] + [getattr(module, name) for name in _GLOBAL]


def may_capture_step(optimizer: NoisyOptimizer) -> bool:
    """Tell whether a replay of an optimizer's step leaves nothing out that it does in Python."""
    pre_hooks, *others = _hooks_of_steps(optimizer)
    step = vars(optimizer.original_optimizer).get("step")
    return (
        (step is None or hasattr(step, "_wrapped_by_lr_sched"))  # which only counts
        and type(optimizer.original_optimizer) in _ON_DEVICE
        and len(pre_hooks) == 1  # which refuses a step without noise
        and not any(others)
        and not any(
            isinstance(number, Tensor)
            for group in optimizer.param_groups
            for number in (group["lr"], *group.get("betas", ()))
        )
    )


def takes_rate_on_device(group: dict[str, Any]) -> bool:
    """Tell whether a group's optimizer can take its learning rate as a number on the device."""
    is_number = isinstance(group["lr"], int | float)
    return is_number and ("capturable" in group or bool(group.get("fused")))
