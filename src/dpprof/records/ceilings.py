"""What a device can do at most, as measured on it: one JSON for each device.

Products of matrices, copies and launches bound every step from above (Williams et al. 2009,
"Roofline"). A data sheet's figure cannot be reached; the fastest product that was ever seen
can ("maximum achievable matmul FLOPS").
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dpprof.records.record import Part, read_record, write_record
from dpprof.spec.target import DTYPES, Dtype

SCHEMA_VERSION: Literal[1] = 1

CEILINGS = "ceilings"
"""The folder of ceilings in ``results``."""


class Repeated(Part):
    """How long one thing took, over and over."""

    seconds: float = Field(description="the fastest repeat")
    median_s: float = Field(description="the median over rounds of each round's median")
    repeats: int


class ProductSample(Repeated):
    """Products of one size: n x n times n x n."""

    size: int = Field(description="n")


class Matmul(Part):
    """Products of matrices of one dtype."""

    flops_per_s: float = Field(description="2 n^3 over the fastest repeat of any size")
    size: int = Field(description="the n at which that was")
    samples: list[ProductSample] = Field(description="each size that was measured")
    stopped: str | None = Field(description="why no larger size was; null where all were")


class CopySample(Repeated):
    """Copies of an array of one size."""

    array_bytes: int = Field(description="of the array; a copy reads and writes as much each")


class Bandwidth(Part):
    """Copies within the device's memory."""

    bytes_per_s: float = Field(
        description="bytes read and written, twice the array, over the fastest repeat of any size"
    )
    array_bytes: int = Field(description="the size at which that was")
    samples: list[CopySample] = Field(description="each size that was measured")
    stopped: str | None = Field(description="why no larger size was; null where all were")


class Limits(Part):
    """What the measuring process hands back; the rest is added outside."""

    matmul: dict[Dtype, Matmul | None]
    bandwidth: Bandwidth | None
    launch_latency_s: float | None = Field(
        description="of an operator on one element, among a thousand such; the fastest round"
    )
    reasons: dict[str, str] = Field(description="why a figure is null, by dotted key")


def nothing_measured(reason: str) -> Limits:
    """State that no figure is known, each for the same reason."""
    keys = [*(f"matmul.{dtype}" for dtype in DTYPES), "bandwidth", "launch_latency_s"]
    return Limits(
        matmul=dict.fromkeys(DTYPES),
        bandwidth=None,
        launch_latency_s=None,
        reasons=dict.fromkeys(keys, reason),
    )


class Ceilings(Limits):
    """One JSON file per device. Every key is always present; unknown is null."""

    schema_version: Literal[1] = SCHEMA_VERSION
    device: dict[str, Any] = Field(description="as in results")
    started_at: str = Field(description="UTC, ISO 8601")
    wall_s: float
    others_busy_cores: float | None = Field(
        description="cores that other processes kept busy meanwhile, on average"
    )
    code_digest: str = Field(description="sha256 over the sources and versions that measured")
    content_digest: str = Field(description="sha256 of the canonical JSON of everything else")
    provenance: dict[str, Any]


def device_name(description: Mapping[str, Any]) -> str:
    """Name a device so that files can be called by it.

    A CPU is named with all cores that dpprof may use, whatever number of threads an experiment
    took: its ceilings are the whole device's.

    Args:
        description: Of a result or of ceilings: ``type``, ``name``, and a CPU's ``cores``.

    Returns:
        ``cpu-<name>-<n>-cores``, or ``cuda-<name>``; what is unknown is left out.
    """
    parts = [str(description["type"])]
    if description.get("name"):
        parts.append(_slug(description["name"]))
    if description.get("cores"):
        parts.append(f"{description['cores']}-cores")
    return "-".join(parts)


def _slug(name: str) -> str:
    """Spell a name in lower-case letters, digits and single hyphens."""
    without_marks = re.sub(r"\((?:R|TM|C)\)", " ", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", without_marks.lower()).strip("-")


def ceilings_path(root: Path, name: str) -> Path:
    """Say where a device's ceilings live: ``results/ceilings/<name>.json``."""
    return root / "results" / CEILINGS / f"{name}.json"


def write_ceilings(path: Path, fields: Mapping[str, Any]) -> Ceilings:
    """Complete ceilings with their content digest and write them as a whole.

    Args:
        path: Where they go; replaced atomically.
        fields: Every field of ``Ceilings`` but ``content_digest``.
    """
    return write_record(path, Ceilings, fields)


def read_ceilings(path: Path) -> Ceilings:
    """Read and check the ceilings of a device.

    Raises:
        ResultError: The file is cut, edited, or of another schema version.
        FileNotFoundError: There is no such file.
    """
    return read_record(path, Ceilings, SCHEMA_VERSION)


def find_ceilings(known: Iterable[Ceilings], description: Mapping[str, Any]) -> Ceilings | None:
    """Find a device's ceilings by what they say they are of; None where there are none.

    Not by the file's name: what plans a sweep on a cluster may see no GPU, and then asks
    for those of ``cuda``. Of several on the same kind of device the last measured count.

    Args:
        known: Ceilings of any devices.
        description: The device, as a result describes it.
    """
    name = device_name(description)
    of_it = [one for one in known if device_name(one.device) == name]
    return max(of_it, key=lambda one: one.started_at, default=None)
