"""A target: the limits of a device that bound a training step (memory, compute, bandwidth)."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field

from dpprof.experiments.config.quantities import Positive, Size, optional
from dpprof.experiments.config.validation import refuse
from dpprof.system.files import canonical_json

Dtype = Literal["float32", "tf32", "bfloat16", "float64", "float16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

RATED: tuple[Dtype, ...] = ("float32", "tf32", "bfloat16", "float64")
"""Dtypes that have peaks of their own; float16 has bfloat16's where a target does not say more."""

_CEILINGS: Mapping[str, Dtype] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float64": "float64",
    "int8": "bfloat16",  # a lower bound: units for int8 are faster where there are some
}

_TENSOR_CORES_IN_BFLOAT16 = 8
"""The first major compute capability whose GPUs multiply bfloat16; from it on, and PyTorch has
flash attention (NVIDIA A100 architecture white paper; sdp_utils.cpp)."""


def ceiling_of(op_dtype: str, dtype: Dtype) -> Dtype:
    """Return the dtype whose ceiling binds the products of an operator.

    ``op_dtype`` is the operator's, by its name in torch; ``dtype`` the experiment's, which says
    whether float32 products are TF32.
    """
    return _CEILINGS.get(op_dtype, "tf32" if dtype == "tf32" else "float32")


_FOR_EVERY_DTYPE = BeforeValidator(
    lambda value: value if isinstance(value, Mapping) else dict.fromkeys(RATED, value)
)
"""Ceilings by dtype; a single number counts for every dtype."""


class Target(BaseModel, frozen=True, extra="forbid"):
    """A device, described by the limits that bound a training step on it."""

    memory_bytes: Size = Field(description="memory that training can allocate")
    flops_per_s: Annotated[dict[Dtype, Positive], _FOR_EVERY_DTYPE] = Field(
        description="dense FLOP/s of matrix products: one number, or one for each dtype"
    )
    bandwidth_bytes_per_s: Positive = Field(description="bandwidth of that memory")
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] = Field(
        "8.0", description="of the CUDA device; decides how much memory libraries allocate"
    )
    multiprocessors: Annotated[int, Field(ge=1, le=1024)] | None = optional(
        "of the CUDA device; decides what reductions allocate while they run, which is "
        "left out where this is not given"
    )
    source: str = Field("the config", description="source of the figures")

    def peak(self, dtype: Dtype) -> float | None:
        """Return the dense FLOP/s of matrix products of a dtype; None if unknown."""
        peak = self.flops_per_s.get(dtype)
        return self.flops_per_s.get("bfloat16") if peak is None and dtype == "float16" else peak

    def price_of(self, dtype: str) -> str | None:
        """Say what a dtype costs on a GPU that has no units for it; None for one that has."""
        is_old = int(self.compute_capability.partition(".")[0]) < _TENSOR_CORES_IN_BFLOAT16
        if not is_old or dtype not in ("bfloat16", "tf32"):
            return None
        if dtype == "tf32":
            return (
                f"compute capability {self.compute_capability} has no units for TF32: products are "
                "those of float32; use float16"
            )
        return (
            f"compute capability {self.compute_capability} has no units for bfloat16: products run "
            "at most as fast as in float32, and attention keeps every score; use float16"
        )

    def __hash__(self) -> int:
        """Return a hash of the content, because the mapping of ceilings has no hash."""
        return hash(canonical_json(self.model_dump(mode="json")))


CPU_TARGET = "cpu"  # the target for this machine: an estimate for it models no CUDA libraries


def device_of(target: str | Target) -> Literal["cpu", "cuda"]:
    """Return the kind of device that a target's experiments run on."""
    return "cpu" if target == CPU_TARGET else "cuda"


def settle_device(fields: dict[str, Any], auto: Callable[[], str], key: str) -> dict[str, Any]:
    """Return fields with a missing or ``auto`` device set to the target's kind or this machine's.

    ``auto`` returns this machine's device; ``key`` is the user's name for the device.

    Raises:
        InputError: The given device is not the target's kind.
    """
    target, device = fields.get("target"), fields.get("device", "auto")
    if device == "auto":
        device = auto() if target is None else device_of(target)
    elif target is not None and device != device_of(target):
        raise refuse(
            key, device, f"target {spell_target(target)} requires {device_of(target)}; leave it out"
        )
    return fields | {"device": device}


def spell_target(target: str | Target) -> str:
    """Return a target as a message names it."""
    return target if isinstance(target, str) else "as a mapping"
