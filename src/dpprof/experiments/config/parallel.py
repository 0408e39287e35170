"""Data-parallel training: several ranks that train one model."""

from functools import partial
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from dpprof.experiments.config.quantities import optional, read_pairs, refuse_bool

MOST_RANKS = 65_536

GPUS_PER_NODE = 8


class Parallel(BaseModel, frozen=True, extra="forbid"):
    """Ranks that compute the gradients of a part of each batch."""

    kind: Literal["ddp", "fsdp", "hsdp"] = Field(
        description="ddp (DistributedDataParallel, each rank has the whole model); fsdp (FSDP2's "
        "fully_shard of each block and of the model, each rank has a shard of each parameter); "
        "hsdp (the same with shards inside a node, and a replica of the model on each node)"
    )
    world_size: Annotated[int, Field(ge=2, le=MOST_RANKS), BeforeValidator(refuse_bool)] = Field(
        description="number of ranks, one on each GPU, or together on this machine's CPU"
    )

    reshard_after_forward: bool | None = optional(
        "whether fsdp frees gathered parameters after forward and gathers them again "
        "in backward; null: those of blocks, PyTorch's default"
    )
    exchange: Literal["last", "each"] = Field(
        "last",
        description="which of a step's accumulated batches exchanges gradients: the last, as under "
        "no_sync and in accelerate, where with fsdp whole gradients wait on each rank; or each, "
        "as plain backward does (method standard)",
    )
    gpus_per_node: Annotated[int, Field(ge=1, le=72), BeforeValidator(refuse_bool)] = Field(
        GPUS_PER_NODE, description="ranks that share a node; times and hsdp depend on it"
    )
    network_gb_per_s: Annotated[float, Field(gt=0, le=1e4)] | None = optional(
        "GB/s between nodes for each GPU, one way: an InfiniBand port of 400 Gb/s for "
        "each GPU is 50; null: as nodes with such GPUs usually have"
    )

    @model_validator(mode="after")
    def _refuse_resharding(self) -> Self:
        if self.kind == "ddp" and self.reshard_after_forward is not None:
            raise ValueError("reshard_after_forward belongs to kind fsdp, and kind is ddp")
        if self.kind == "hsdp" and self.world_size % self.shards:
            raise ValueError(
                f"hsdp has a replica on each node, and {self.world_size} ranks are not whole nodes "
                f"of {self.gpus_per_node} (gpus_per_node)"
            )
        return self

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have parts of parameters."""
        return self.kind != "ddp"

    @property
    def shards(self) -> int:
        """Ranks that have a part of each parameter."""
        of = {"ddp": 1, "fsdp": self.world_size, "hsdp": min(self.world_size, self.gpus_per_node)}
        return of[self.kind]

    @property
    def replicas(self) -> int:
        """Groups of ranks that have the whole model."""
        return self.world_size // self.shards

    @property
    def text(self) -> str:
        """The ranks in a cell of a table: ``fsdp x8``, ``fsdp (resharding) x8``."""
        resharding = {None: [], True: ["resharding"], False: ["gathered until backward"]}
        notes: list[str] = [*resharding[self.reshard_after_forward]]
        if self.exchange == "each":
            notes.append("exchanging each batch")
        if self.gpus_per_node != GPUS_PER_NODE:
            notes.append(f"{self.gpus_per_node} a node")
        if self.network_gb_per_s is not None:
            notes.append(f"{self.network_gb_per_s:g} GB/s")
        noted = f" ({', '.join(notes)})" if notes else ""
        return f"{self.kind}{noted} x{self.world_size}"

    @property
    def slug(self) -> str:
        """The ranks in a file's name: ``fsdp8``."""
        return f"{self.kind}{self.world_size}"


def read_world_size(text: object) -> int:
    """Return the number of ranks in a cell that ``Parallel.text`` wrote; 1 for an empty cell."""
    return int(text.rpartition(" x")[2]) if isinstance(text, str) else 1


AsParallel = Annotated[
    Parallel,
    BeforeValidator(
        partial(read_pairs, example="kind=fsdp,world_size=8"), json_schema_input_type=Parallel | str
    ),
]
