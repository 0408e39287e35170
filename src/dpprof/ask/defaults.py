"""What a question takes for granted: settings that people train with on a GPU, and the GPU here."""

from collections.abc import Mapping
from typing import Any

from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.config.optimizers import COUNTS_ON_HOST
from dpprof.experiments.config.refusals import INDEPENDENT
from dpprof.experiments.config.target import Target
from dpprof.experiments.config.validation import InputError, spell
from dpprof.system.hardware import nvml, visible_gpus

CAPTURED = ("flash-bk", "flash")
"""Methods whose steps are CUDA graphs where a private loop runs as it does by default."""

DESCRIBED: Mapping[str, str] = {
    "dtype": "on a GPU bfloat16, float16 before compute capability 8.0; else float32",
    "optimizer": "on a GPU adamw-fused; else adamw",
    "target": "the GPU here, with what others leave of it",
}
"""The defaults, as the help of commands says them."""

LOSS_SCALE = 65_536  # the scale of losses in float16: the first of ``torch.amp.GradScaler``

_OTHERS_HOLD = 2**30
"""Others use a GPU of which more bytes are taken: less may be the driver's own."""

_STEP = 256 * 2**20
"""Free memory is rounded down to multiples, so that a question asked again is the same."""


def add_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a question with what people train with on its GPU, where not stated.

    The dtype is bfloat16, or float16 with a loss scale on a card without units for bfloat16; the
    optimizer is fused AdamW. A question about no GPU stays as it is.
    """
    target = _find_gpu(fields.get("target"))
    if target is None:
        return dict(fields)
    usual: dict[str, Any] = {"optimizer": "adamw-fused"}
    if "dtype" not in fields and target.peak("bfloat16") is not None:
        is_old = target.price_of("bfloat16") is not None
        usual |= {"dtype": "float16", "loss_scale": LOSS_SCALE} if is_old else {"dtype": "bfloat16"}
    settled = {**usual, **fields}
    is_alone = settled.get("parallel") is None and settled["optimizer"] not in COUNTS_ON_HOST
    is_alone &= settled.get("noise_strategy", INDEPENDENT) == INDEPENDENT
    is_alone &= str(settled.get("accumulation", 1)) == "1"
    is_alone &= settled.get("lengths") is None and not is_true(settled.get("poisson", False))
    if settled.get("method") in CAPTURED and is_alone:
        return {"execution": "graph", **settled}
    return settled


def is_true(value: Any) -> bool:
    """Tell whether a flag is set, as it is spelled in a file or on the command line."""
    return str(value).lower() in ("true", "1", "yes", "on", "t", "y")


def _find_gpu(target: Any) -> Target | None:
    """Return the GPU that a question is about; None for another target, or one to be refused."""
    if isinstance(target, Mapping):
        try:
            return Target.model_validate(target)
        except ValueError:
            return None  # it is refused, in a sentence, where the experiment is made
    return registry.find_gpu(target)


def find_target() -> dict[str, Any]:
    """Return the fields for the GPU here: its name as a target, and what others leave of it.

    Raises:
        InputError: There is no GPU, or no target is like it.
    """
    key = spell("target")
    gpus = visible_gpus()
    if not gpus:
        raise InputError(
            f"{key}: missing, and there is no GPU here; give one, such as rtx-4090, a100 or h100, "
            "or a mapping of memory_bytes, flops_per_s and bandwidth_bytes_per_s"
        )
    sheet = find_by_device_name(gpus[0].name)
    names = registry.names("targets")
    like = [name for name in names if sheet and registry.load("targets", name) == sheet]
    if sheet is None or not like:
        raise InputError(
            f"{key}: missing, and no target is like the GPU here, {gpus[0].name}; give one of "
            f"{', '.join(names)}, or a mapping of memory_bytes, flops_per_s and "
            "bandwidth_bytes_per_s"
        )
    taken = 0
    with nvml() as driver:
        handle = driver.nvmlDeviceGetHandleByUUID(gpus[0].uuid)
        taken = int(driver.nvmlDeviceGetMemoryInfo(handle, driver.nvmlMemory_v2).used)
    if taken <= _OTHERS_HOLD:
        return {"target": like[0]}
    left = max(sheet.memory_bytes - taken, _STEP) // _STEP * _STEP
    return {"target": like[0], "memory_limit_bytes": left}
