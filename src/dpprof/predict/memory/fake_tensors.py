"""What PyTorch and Opacus need to run under fake tensors, and as one rank of several.

A fake tensor has a shape, a dtype and a storage's size, but no elements. ``fake_tensors`` replaces
what fails for such tensors in private steps; ``fake_ranks`` stands in for the other ranks.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.utils._per_sample_grad as per_sample_grad
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import Reducer
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.utils._expanded_weights.expanded_weights_impl import ExpandedWeight
from torch.utils._python_dispatch import _disable_current_modes

from dpprof.private.errors import UnsupportedError
from dpprof.private.substitutes import substitute
from dpprof.subjects.models.quantized import import_bitsandbytes, make_dynamic_map

_apply = nn.Module._apply  # noqa: SLF001 (what every conversion of a module calls)


def _apply_to_fake(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Do what ``nn.Module._apply`` does with new parameters; it cannot swap fake ones.

    A parameter that several modules share stays shared.
    """
    if not any(isinstance(tensor, FakeTensor) for tensor in module.parameters()):
        return _apply(module, fn, recurse)  # type: ignore[no-untyped-call]
    applied: dict[Tensor, nn.Parameter] = {}
    for layer in module.modules() if recurse else (module,):
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.is_floating_point():  # quantised: it has attributes, and stays
                applied[parameter] = parameter
            elif parameter not in applied:
                with torch.no_grad():
                    new = nn.Parameter(fn(parameter), requires_grad=parameter.requires_grad)
                applied[parameter] = new
            layer.register_parameter(name, applied[parameter])
        for name, buffer in layer.named_buffers(recurse=False):
            setattr(layer, name, fn(buffer))
    return module


class _FakeExpandedWeight(ExpandedWeight):
    """An expanded weight whose carrier, which is never computed with, is no fake tensor."""

    def __new__(cls, orig_weight: Tensor, batch_size: int, loss_reduction: str) -> Any:
        if not isinstance(orig_weight, FakeTensor):
            return ExpandedWeight.__new__(  # type: ignore[no-untyped-call]
                cls, orig_weight, batch_size, loss_reduction
            )
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            carrier = torch.empty(0, device="meta")
            return torch.Tensor._make_subclass(cls, carrier, require_grad=True)  # noqa: SLF001


@contextmanager
def _fake_optimizers() -> Iterator[None]:
    """Let optimizers run that need elements of tensors."""
    # By name in sys.modules: torch.optim removes this module from its own attributes.
    adafactor = importlib.import_module("torch.optim._adafactor")
    step = adafactor._single_tensor_adafactor  # noqa: SLF001 (no public name)

    def step_as_if_known(*args: Any, **kwargs: Any) -> None:
        # It reads elements, and does the same whatever it reads.
        with substitute(Tensor, "item", lambda _: 1.0):
            step(*args, **kwargs)

    with ExitStack() as within:
        within.enter_context(substitute(adafactor, "_single_tensor_adafactor", step_as_if_known))
        if "bitsandbytes" in sys.modules:  # its 8-bit optimizers make a map, of its elements
            functional = import_bitsandbytes().functional
            within.enter_context(substitute(functional, "create_dynamic_map", make_dynamic_map))
            # A gathered weight gets its layer's scales; bitsandbytes makes a new parameter of it.
            recover = lambda layer: vars(layer.weight).update(quant_state=layer.quant_state)  # noqa: E731
            layers = import_bitsandbytes().nn.modules
            name = "fix_4bit_weight_quant_state_from_module"
            within.enter_context(substitute(layers, name, recover))
        yield


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make every tensor fake that is created within.

    Raises:
        UnsupportedError: Code within asked for a fake tensor's elements.
    """
    # Every conversion of a module calls _apply, call_for_per_sample_grads makes ExpandedWeight, and
    # trunc_normal_ draws until no element is out of bounds; none has a hook.
    with (
        warnings.catch_warnings(),
        substitute(nn.Module, "_apply", _apply_to_fake),
        substitute(per_sample_grad, "ExpandedWeight", _FakeExpandedWeight),
        substitute(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor),
        _fake_optimizers(),
        FakeTensorMode() as mode,
    ):
        # Opacus copies gradients with deepcopy, which would copy this mode too. A subclass does not
        # help: PyTorch looks some operators up by the mode's exact type.
        mode.__deepcopy__ = lambda _: mode  # type: ignore[attr-defined]
        # Opacus checks whether tensors have data.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        try:
            yield mode
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedFakeTensorException,
            UnsupportedOperatorException,
        ) as error:
            what = getattr(error, "func", None) or error
            raise UnsupportedError(
                f"it needs the elements of a tensor ({what}), and an estimate has only shapes; the "
                "instrument memory runs it"
            ) from error


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of so many ranks within; collectives return at once and move nothing.

    DDP keeps its first buckets (``models.distribute``). Once it knows the order of the gradients,
    it would make new buckets and compare them with other ranks, which needs elements.
    """
    if world_size == 1:
        yield
        return
    # Importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with substitute(Reducer, "_rebuild_buckets", lambda _: False):
            yield
    finally:
        distributed.destroy_process_group()
