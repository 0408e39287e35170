"""What bounds a training step on a device: memory, compute, bandwidth."""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dpprof.spec.quantities import Positive, Size
from dpprof.system.files import canonical_json

Dtype = Literal["float32", "tf32", "bfloat16", "float64"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def _for_every_dtype(value: object) -> object:
    """Take a single number for the ceiling of every dtype."""
    if isinstance(value, Mapping):
        return value
    return dict.fromkeys(DTYPES, value)


class Target(BaseModel):
    """A device, by what bounds a training step on it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_bytes: Size = Field(description="memory that a training can allocate")
    flops_per_s: Annotated[dict[Dtype, Positive], BeforeValidator(_for_every_dtype)] = Field(
        description="dense FLOP/s of matrix products: one number, or one for each dtype"
    )
    bandwidth_bytes_per_s: Positive = Field(description="bandwidth of that memory")
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] = Field(
        "8.0", description="of the CUDA device, which decides what libraries take"
    )
    source: str = Field("the config", description="where the figures are from")

    def __hash__(self) -> int:
        """Hash by content: the mapping of ceilings has no hash of its own."""
        return hash(canonical_json(self.model_dump(mode="json")))
