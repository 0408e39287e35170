"""A device's ceilings, and times of operators, measured on it: one JSON file per device.

The speeds of matrix products, copies and launches are upper bounds of every step (Williams et al.
2009, "Roofline"). No program reaches a data sheet's figure. The fastest measured product can be
reached ("maximum achievable matmul FLOPS").
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dpprof.experiments.config.quantities import Positive
from dpprof.experiments.config.target import DTYPES, Dtype
from dpprof.experiments.records.record import Device, Part, read_record

CEILINGS = "ceilings"  # the name of the folder for ceilings in ``results``


_Count = Annotated[int, Field(gt=0, lt=2**53)]
"""What a column of a table holds that has unknown values too."""


class Repeated(Part):
    """Times of one repeated operation."""

    seconds: float = Field(description="the fastest repeat")
    median_s: float = Field(description="the median over rounds of each round's median")
    repeats: int


class ProductSample(Repeated):
    """Matrix products of one size: n x n times n x n."""

    size: int = Field(description="n")


class Matmul(Part):
    """Matrix products of one dtype."""

    flops_per_s: Positive = Field(description="2 n^3 over the fastest repeat of any size")
    size: _Count = Field(description="the n of that repeat")
    samples: list[ProductSample] = Field(description="one per measured size")
    stopped: str | None = Field(
        description="why larger sizes were not measured; null where all were"
    )


class CopySample(Repeated):
    """Copies of an array of one size."""

    array_bytes: int = Field(description="size of the array; a copy reads and writes it once each")


class Bandwidth(Part):
    """Copies within the device's memory."""

    bytes_per_s: Positive = Field(
        description="bytes read and written, twice the array, over the fastest repeat of any size"
    )
    array_bytes: _Count = Field(description="size of the array in that repeat")
    samples: list[CopySample] = Field(description="one per measured size")
    stopped: str | None = Field(
        description="why larger sizes were not measured; null where all were"
    )


class Limits(Part):
    """The ceilings that the measuring process returns; its parent process adds the rest."""

    matmul: dict[Dtype, Matmul | None]
    bandwidth: Bandwidth | None
    launch_latency_s: float | None = Field(
        description="time of an operator on one element, one of a thousand; the fastest round"
    )
    reasons: dict[str, str] = Field(description="why a figure is null, by dotted key")


def nothing_measured(reason: str) -> Limits:
    """Return ceilings in which every figure is null for the same reason."""
    keys = [*(f"matmul.{dtype}" for dtype in DTYPES), "bandwidth", "launch_latency_s"]
    return Limits(
        matmul=dict.fromkeys(DTYPES),
        bandwidth=None,
        launch_latency_s=None,
        reasons=dict.fromkeys(keys, reason),
    )


class OperatorShape(Part):
    """What the time of an operator depends on."""

    op: str = Field(description="its name, such as addmm")
    call: str = Field(description="digest of its overload, and of the layouts of its arguments")
    layout: str = Field(
        description="its overload, and how its arguments lie in memory, whatever their sizes"
    )
    family: str = Field(description="what kind of work it does")
    dtype: str = Field(description="of its first tensor")
    flops: int
    read_bytes: int = Field(description="what it reads, each once; of a table what it looks up")
    written_bytes: int
    row: int = Field(description="elements of the last axis of its largest tensor")
    product: tuple[int, int, int, int] | None = Field(
        description="batch, m, n and k of a matrix product"
    )


class OperatorTime(OperatorShape):
    """The time of one operator at one set of arguments."""

    seconds: float = Field(description="the median of the rounds, with calling it from Python")
    spread: float = Field(
        description="standard deviation of the logarithm of rounds, beyond the drift of all"
    )


class OperatorTable(Part):
    """Operators of training steps that were timed one by one."""

    operators: list[OperatorTime]
    threads: int = Field(description="that computed")
    rounds: int = Field(description="how many times each was timed, one after all others")
    drift: float | None = Field(
        description="standard deviation of the logarithm of the machine's speed between rounds; "
        "null after one"
    )
    host_s: float = Field(
        description="what a step takes besides its operators, for each: Python, hooks, autograd"
    )
    host_spread: float = Field(description="standard deviation of its logarithm")
    step_factor: float = Field(
        description="how many times as long operators take in a step as alone, by one step of small"
    )
    experiments: list[str] = Field(description="ids of the experiments whose operators these are")
    left_out: dict[str, str] = Field(
        description="experiments and operators that were not timed, and why"
    )
    wall_s: float


class Ceilings(Limits):
    """One JSON file per device. Every key is always present; unknown values are null."""

    schema_version: Literal[4] = 4
    device: Device = Field(description="the device, as results describe it")
    started_at: str = Field(description="start of the measurement: UTC, ISO 8601")
    wall_s: float
    others_busy_cores: float | None = Field(
        description="average number of cores that other processes kept busy meanwhile"
    )
    operators: OperatorTable | None = Field(
        description="times of the operators of experiments, which predictions for it rest on"
    )
    code_digest: str = Field(description="sha256 of the sources and versions that measured")
    content_digest: str = Field(description="sha256 of the canonical JSON of everything else")
    provenance: dict[str, Any]


def device_name(description: Mapping[str, Any]) -> str:
    """Return a device's name for files: ``cpu-<name>-<n>-cores`` or ``cuda-<name>``.

    A kind that is not known is called ``unknown``; other unknown parts are left out. A CPU's cores
    are all that dpprof may use, regardless of an experiment's threads, because ceilings are for the
    whole device.
    """
    parts = [str(description.get("type") or "unknown")]
    if description.get("name"):
        name = re.sub(r"\((?:R|TM|C)\)", " ", description["name"], flags=re.IGNORECASE)
        parts.append(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))
    if description.get("cores"):
        parts.append(f"{description['cores']}-cores")
    return "-".join(parts)


def ceilings_path(root: Path, name: str) -> Path:
    """Return the path of a device's ceilings: ``results/ceilings/<name>.json``."""
    return root / "results" / CEILINGS / f"{name}.json"


def read_ceilings(path: Path) -> Ceilings:
    """Read and check the ceilings of a device.

    Raises:
        ResultError: The file is cut, edited, or of another schema version.
        FileNotFoundError: There is no such file.
    """
    return read_record(path, Ceilings)


def find_ceilings(measured: Iterable[Ceilings], description: Mapping[str, Any]) -> Ceilings | None:
    """Return a device's ceilings; None where there are none.

    The ceilings' own description of the device decides, not the file's name: a machine that plans
    a sweep on a cluster may see no GPU, and then the file is named ``cuda``. Of several ceilings of
    the same kind of device, the last measured ones count.
    """
    name = device_name(description)
    of_it = [ceilings for ceilings in measured if device_name(ceilings.device) == name]
    return max(of_it, key=lambda ceilings: ceilings.started_at, default=None)
