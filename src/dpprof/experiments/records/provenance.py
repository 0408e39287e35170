"""The provenance of a number: code, packages, machine and settings."""

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from dpprof.system.hardware import cpu_name, torch_build
from dpprof.system.paths import find_checkout

_PACKAGES = ("torch", "opacus", "numpy", "triton", "snakemake", "pydantic", "dpprof")

_SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "LD_PRELOAD",
)


def package_versions(names: tuple[str, ...] = _PACKAGES) -> dict[str, str | None]:
    """Return installed versions by package; None where a package is not installed."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _git(*arguments: str) -> str | None:
    checkout = find_checkout()
    if checkout is None:  # git would describe whatever repository an environment lies in
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments],  # noqa: S607 (git is wherever the user has it)
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_git() -> dict[str, Any]:
    """Return the commit and whether tracked files differ from it, or null with a reason."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None, "reason": "no git, or not a git checkout"}
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status), "reason": None}


def describe_surroundings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return a description of code, packages, machine and settings, without importing torch.

    ``environment`` is that of the measuring process.
    """
    torch_version, torch_cuda = torch_build()
    return {
        "command": [Path(sys.executable).name, *sys.argv],
        "git": describe_git(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "torch_build": torch_version,
        "cuda": torch_cuda,
        "host": {
            "hostname": socket.gethostname(),
            "os": platform.platform(),
            "cpu": cpu_name(),
            "cores_logical": psutil.cpu_count(),
            "cores_physical": psutil.cpu_count(logical=False),
            "memory_total_bytes": psutil.virtual_memory().total,
            "load_average": list(os.getloadavg()),
        },
        "settings": {name: environment[name] for name in _SETTINGS if name in environment},
    }
