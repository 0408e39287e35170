"""What a run's memory at its peak consists of: rows by component, layer and operator."""

from typing import TypedDict

from dpprof.records.result import Result
from dpprof.records.step_costs import Memory
from dpprof.spec.validation import InputError

ROUNDING = "allocator_rounding"
"""The component of bytes that belong to no tensor: what CUDA's caching allocator takes for whole
blocks, beyond the sizes of the timeline."""

RECORDERS = "memory, estimate, capacity"

_WORDS = {
    "per_sample_gradients": "per-sample gradients",
    "dp_activations": "activations that hooks keep",
    "allocator_rounding": "rounding of the allocator",
    "unattributed": "unattributed memory",
}
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


class Holding(TypedDict):
    """Bytes that are live at the peak, and what allocated them; all values are plain JSON."""

    component: str
    layer: str | None
    """The module, by its path; None outside the model."""

    op: str
    phase: str
    bytes: int
    storages: int


def list_holdings(result: Result) -> list[Holding]:
    """Return every byte of a run's peak as rows, the largest first.

    The rows sum to ``memory.peak_allocated_bytes``, with 0 bytes left. Storages keep the sizes
    that the timeline counts, which are multiples of 512 bytes on CUDA. What the allocator's whole
    blocks take beyond these is a row of the component ``allocator_rounding``.

    Args:
        result: Of an instrument that records or predicts memory.

    Raises:
        InputError: The result does not tell what was live at the peak.
    """
    memory = result.memory
    if memory is None or memory.at_peak is None or memory.at_peak.holdings is None:
        raise InputError(_explain_missing(result))
    held = memory.at_peak.holdings
    columns = (held.component, held.layer, held.op, held.phase, held.bytes, held.storages)
    names = ("component", "layer", "op", "phase", "bytes", "storages")
    rows = [
        Holding(**dict(zip(names, row, strict=True)))  # type: ignore[typeddict-item]
        for row in zip(*columns, strict=True)
    ]
    rounding = peak_bytes(memory) - sum(row["bytes"] for row in rows)
    if rounding:
        rows.append(
            Holding(
                component=ROUNDING,
                layer=None,
                op="caching allocator",
                phase=memory.at_peak.phase,
                bytes=rounding,
                storages=0,
            )
        )
    return rows


def peak_bytes(memory: Memory) -> int:
    """Return the peak of the steady state that holdings explain."""
    assert memory.peak_allocated_bytes is not None  # known wherever a timeline is
    return memory.peak_allocated_bytes


def _explain_missing(result: Result) -> str:
    if result.outcome != "ok":
        why = "" if result.error is None else ": " + " ".join(result.error.message.split())
        return f"the run ended as {result.outcome}, so its memory is unknown{why}"
    if result.memory is None or result.memory.at_peak is None:
        return (
            f"the instrument {result.instrument} does not tell what was live at the peak; "
            f"run one of these instead: {RECORDERS}"
        )
    return (
        f"an earlier dpprof wrote it, without every layer's bytes at the peak; run the "
        f"instrument {result.instrument} again"
    )


def say_size(size: int) -> str:
    """Return a number of bytes in the largest unit that it fills, such as 540.0 MiB."""
    for unit, factor in _UNITS.items():
        if abs(size) >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,} bytes"


def name_component(component: str) -> str:
    """Return a component in words."""
    return _WORDS.get(component, component.replace("_", " "))
