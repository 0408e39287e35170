"""The devices that an estimate can be for; they need not be present.

``tables/datasheets.json`` has a row for each GPU. ``driver`` is the name by which its driver calls
it; the RTX 3060 and 4060 Ti have none here, because boards of two sizes share one. Each is an
attribute of this module too, as ``H100_PCIE`` of the row h100-pcie, by which pyproject.toml
declares it, some by several names.

Memory is the device's total that PyTorch reports in public logs (the least where drivers differ),
minus the memory of a CUDA context and its libraries. Compute and bandwidth are the data sheets'
dense figures, because training does not use the sparse ones, which are twice as high. GeForce cards
add up products of 16 bits in float32 at half the speed of adding them up in 16 bits; PyTorch adds
up in float32. A test computes the peaks again from processors and clocks; a sparse figure fails it.
``watts`` is the most that a board draws, of a GH200 with its processor.

Volta and Turing have neither TF32 nor bfloat16: their products run as float32's, which is an upper
bound for bfloat16.

Where totals are in issues: T4 Zheng-Chong/CatVTON 133; V100 kchengiva/Shift-GCN 34 (16 GB) and
liucongg/ChatGLM-Finetuning 73 (32 GB); RTX 3060 Kunhao-Liu/StyleGaussian 12; RTX 3090
vllm-project/vllm 16343; RTX 5090 TrajectoryCrafter/TrajectoryCrafter 20; RTX PRO 6000 antirez/ds4
431. An A5000 has as much memory as an RTX 3090 (24,564 MiB by nvidia-smi, 24,576 by older drivers).
GH200 stas00/ml-engineering 60; RTX 4060 AIRI-Institute/HairFastGAN 8. A10G, A6000, A100 PCIe 40 GB,
RTX 4070 Ti SUPER, 4080 and 5080: logs in public repositories. An L40 has as much as an L40S. Of
other GeForce cards no log was found. They have the least of those of their generation and size;
with 12 GB they lack as much of 12 GiB as these lack of 16 (450 MiB of Ada, 553 of Blackwell).
"""

import json
from typing import Any

from pydantic import ByteSize, TypeAdapter

from dpprof.experiments.config.target import Target
from dpprof.system.paths import PACKAGE

_CONTEXT = "600 MiB"
"""Memory of a CUDA context with cuBLAS and cuDNN loaded: reports give 300 to 450 MiB for the bare
context (pytorch#109888, unsloth-zoo#1053), and the libraries' kernels add to that. A T4's was
measured in training (fitcheck-llm 0.3.1)."""

_ROWS: list[dict[str, Any]] = json.loads(
    (PACKAGE / "experiments" / "config" / "tables" / "datasheets.json").read_text("utf-8")
)


def _read(row: dict[str, Any]) -> Target:
    total, context = TypeAdapter(tuple[ByteSize, ByteSize]).validate_python(
        (row["memory"], row.get("context", _CONTEXT))
    )
    return Target(
        memory_bytes=total - context,
        flops_per_s={dtype: tflops * 1e12 for dtype, tflops in row["tflops"].items()},
        bandwidth_bytes_per_s=row["gb_per_s"] * 1e9,
        compute_capability=row["compute_capability"],
        multiprocessors=row["multiprocessors"],
        source=f"NVIDIA {row['sheet']}, without sparsity",
    )


_TARGETS = {row["name"]: _read(row) for row in _ROWS}
_BY_DEVICE_NAME = dict(zip((row["driver"] for row in _ROWS), _TARGETS.values(), strict=True))

CPU = None  # this machine: it needs no model of libraries and has no data sheet


def __getattr__(name: str) -> Target:
    target = _TARGETS.get(name.lower().replace("_", "-"))
    if target is None:
        raise AttributeError(f"there is no data sheet {name}")
    return target


def find_by_device_name(name: str | None) -> Target | None:
    """Return the target of a driver's name for a GPU; None for unknown variants."""
    return _BY_DEVICE_NAME.get(name) if name else None


def find_context(target: Target | str | None) -> int:
    """Return the bytes of a CUDA context with its libraries on a GPU, by its name where known."""
    contexts = {row["name"]: row["context"] for row in _ROWS if "context" in row}
    context = contexts.get(target, _CONTEXT) if isinstance(target, str) else _CONTEXT
    return TypeAdapter(ByteSize).validate_python(context)


def find_watts(target: Target | None) -> float | None:
    """Return the most that a GPU's board draws; None where it has no data sheet here."""
    watts = dict(zip(_TARGETS.values(), (row["watts"] for row in _ROWS), strict=True))
    return None if target is None else watts.get(target)


def list_targets() -> dict[str, Target]:
    """Return every GPU that has a data sheet here, by name, those with most memory first."""
    return dict(sorted(_TARGETS.items(), key=lambda item: -item[1].memory_bytes))
