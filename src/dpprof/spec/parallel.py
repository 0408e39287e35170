"""Data-parallel training: several ranks that train one model."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from dpprof.spec.quantities import read_pairs, refuse_bool

MOST_RANKS = 65_536


class Parallel(BaseModel, frozen=True, extra="forbid"):
    """Ranks that compute the gradients of a part of each batch."""

    kind: Literal["ddp", "fsdp"] = Field(
        description="ddp (DistributedDataParallel, each rank has the whole model); fsdp (FSDP2's "
        "fully_shard of each block and of the model, each rank has a shard of each parameter)"
    )
    world_size: Annotated[int, Field(ge=2, le=MOST_RANKS), BeforeValidator(refuse_bool)] = Field(
        description="number of ranks, one on each GPU, or together on this machine's CPU"
    )

    reshard_after_forward: bool | None = Field(
        None,
        description="whether fsdp frees gathered parameters after forward and gathers them again "
        "in backward; null: those of blocks, PyTorch's default",
    )

    @model_validator(mode="after")
    def _refuse_resharding(self) -> Self:
        if self.kind == "ddp" and self.reshard_after_forward is not None:
            raise ValueError("reshard_after_forward belongs to kind fsdp, and kind is ddp")
        return self

    @property
    def text(self) -> str:
        """The ranks in a cell of a table: ``fsdp x8``, ``fsdp (resharding) x8``."""
        known = {None: "", True: " (resharding)", False: " (gathered until backward)"}
        return f"{self.kind}{known[self.reshard_after_forward]} x{self.world_size}"

    @property
    def slug(self) -> str:
        """The ranks in a file's name: ``fsdp8``."""
        return f"{self.kind}{self.world_size}"


def read_world_size(text: object) -> int:
    """Return the number of ranks in a cell that ``Parallel.text`` wrote; 1 for an empty cell."""
    return int(text.rpartition(" x")[2]) if isinstance(text, str) else 1


AsParallel = Annotated[
    Parallel,
    BeforeValidator(read_pairs("kind=fsdp,world_size=8"), json_schema_input_type=Parallel | str),
]
