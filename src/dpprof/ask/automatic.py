"""The method that ``make_private`` takes by itself: the one predicted to be faster, if it fits.

Nothing is computed or allocated: a step of each method is traced on a copy of the model that has
shapes and no elements. Where that cannot be, the default is taken, and the reason is logged.

Shape legend: B batch.
"""

import copy
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.amp.autocast_mode import autocast
from torch.optim import SGD, Optimizer
from torch.overrides import TorchFunctionMode

from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.target import Target
from dpprof.private.loop.method_choice import DEFAULT, FirstBatch
from dpprof.private.substitutes import substitute
from dpprof.subjects.models.with_losses import standing_in

if TYPE_CHECKING:
    from dpprof.experiments.records.result import Measurement

TRIED = ("flash-bk", "flash")
MOST_S = 20.0
"""Predictions that have not ended after so many seconds are given up before the next phase."""

_REASON = 200  # letters of a reason that are logged

_log = logging.getLogger("dpprof")


class _NotPredictedError(Exception):
    """The default is taken; the message says why."""


def choose_method(
    model: nn.Module, optimizer: Optimizer, draw: Callable[[], FirstBatch] | None, batch_size: int
) -> str:
    """Return the method that is predicted to be the fastest that fits on the model's GPU.

    Args:
        model: The model on its device, before any clipping.
        optimizer: The optimizer of its parameters.
        draw: Returns a batch of any number of samples; None where its losses are not known.
        batch_size: The samples of a step.

    Returns:
        One of ``TRIED``. A line of the logger ``dpprof`` says why.
    """
    try:
        target, gpu, room = _find_gpu(model)
        if draw is None:
            raise _NotPredictedError("without losses_of there is no step to trace")  # noqa: TRY301
        asked = {"batch_size": batch_size, "target": target, "memory_limit_bytes": room}
        asked["optimizer"] = "adamw"
        if isinstance(optimizer, SGD):
            asked["optimizer"] = "sgd-momentum" if optimizer.defaults["momentum"] else "sgd"
        chosen, why = compare(model, draw(), **asked)
    except _NotPredictedError as reason:
        chosen, why = DEFAULT, f"the default, since {str(reason)[:_REASON]}"
    else:
        why += f", on {gpu}"
    _log.info("method %s: %s", chosen, why)
    return chosen


def _find_gpu(model: nn.Module) -> tuple[Target, str, int]:
    """Return what is known of the model's GPU, its name, and its bytes."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        raise _NotPredictedError("a step on several ranks is not predicted while it is prepared")
    if device.type != "cuda":
        raise _NotPredictedError(f"steps on {device.type} are not predicted")
    gpu = torch.cuda.get_device_properties(device)
    target = find_by_device_name(gpu.name)
    if target is None:
        raise _NotPredictedError(f"the speeds of a {gpu.name} are not known")
    return target, gpu.name, int(gpu.total_memory)


def compare(model: nn.Module, first: FirstBatch, **asked: Any) -> tuple[str, str]:
    """Predict a step of each method; return the faster one that fits, and why it is taken.

    Raises:
        _NotPredictedError: A step cannot be traced, or that takes too long.
    """
    if not all(isinstance(part, Tensor) and part.dim() for part in first.batch):
        raise _NotPredictedError("a batch has other parts than tensors of samples")
    build = partial(_build_copy, model, first)
    estimate = registry.load("instruments", "estimate")
    until = time.monotonic() + MOST_S

    def enter(_: str) -> None:
        if time.monotonic() > until:
            raise _NotPredictedError(f"a prediction takes more than {MOST_S:g} s")

    with registry.lent(build) as name:
        common = {"model": name, "seq_len": 1, "device": "cuda", **asked}
        predicted = {
            method: _predict(partial(estimate, enter=enter), {"method": method, **common})
            for method in TRIED
        }
    fitting = {name: step_s for name, (step_s, fits) in predicted.items() if fits}
    if not fitting:
        return "flash", "none is predicted to fit, and it needs less memory; set max_batch_size"
    chosen = min(fitting, key=lambda name: fitting[name])
    told = [
        f"{name} {1e3 * step_s:,.1f} ms" + ("" if fits else ", which does not fit")
        for name, (step_s, fits) in predicted.items()
    ]
    return chosen, f"predicted for a step of {asked['batch_size']:,} samples: {'; '.join(told)}"


def _predict(
    estimate: Callable[[Experiment], "Measurement"], fields: dict[str, Any]
) -> tuple[float, bool]:
    from dpprof.experiments.launch.worker import undisturbed  # noqa: PLC0415 (not in every training)

    dtype = "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    try:
        with undisturbed():
            measured = estimate(Experiment.model_validate({**fields, "dtype": dtype}))
    except _NotPredictedError:
        raise
    except Exception as error:
        what = f"a step cannot be traced ({type(error).__name__}: {' '.join(str(error).split())})"
        raise _NotPredictedError(what) from error
    if measured.time is None or measured.time.predicted_step_s is None:
        raise _NotPredictedError(f"its time is {measured.reasons.get('time', 'not predicted')}")
    allocator = None if measured.memory is None else measured.memory.allocator
    return measured.time.predicted_step_s.median, allocator is None or allocator.fits is not False


def _build_copy(
    model: nn.Module, first: FirstBatch, experiment: Experiment
) -> tuple[nn.Module, Callable[..., Tensor], list[Tensor]]:
    """Return a copy of the model, whose losses are those of ``losses_of``, and a batch.

    Called under fake tensors: all are on the CPU there, and have no elements.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    copied: dict[int, Any] = {}
    for _, tensor in named:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        copied[id(tensor)] = empty
    twin = copy.deepcopy(model, copied)
    size = experiment.batch_size
    many = [torch.empty((size, *part.shape[1:]), dtype=part.dtype) for part in first.batch]

    def losses_of_twin(*tensors: Tensor) -> Tensor:
        with standing_in(model, twin), _OnCpu(), substitute(autocast, "__init__", _cast_on_cpu):
            return first.losses_of(*tensors)

    return twin, losses_of_twin, many


class _OnCpu(TorchFunctionMode):
    """Puts on the CPU what would be put on a GPU: the trace is of the CPU, and stands for it."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func is Tensor.cuda:
            return args[0]
        others = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **others)


def _on_cpu(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if is_cuda else value


_autocast_init = autocast.__init__


def _cast_on_cpu(self: autocast, device_type: str, *arguments: Any, **others: Any) -> None:
    if device_type == "cuda" and (arguments[:1] or (others.get("dtype"),))[0] is None:
        others["dtype"] = torch.get_autocast_dtype("cuda")
    _autocast_init(self, "cpu" if device_type == "cuda" else device_type, *arguments, **others)
