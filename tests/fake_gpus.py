"""Processes that see GPUs that are not there, as tests/fake_nvml describes them."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from scripts import ROOT, spell

GIB = 2**30


def fake_driver(list_gpus: Callable[[], list[dict]]) -> ModuleType:
    """Return a driver's library for this process, of GPUs as in tests/fake_nvml."""
    path = ROOT / "tests" / "fake_nvml" / "pynvml.py"
    spec = importlib.util.spec_from_file_location("fake_pynvml", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._gpus = list_gpus
    return module


def environment(folder: Path, number: int, source: Path = ROOT / "src") -> dict[str, str]:
    """Describe a number of GPUs in a folder; returns the environment that shows them.

    It has a lock folder of its own, and a torch that was built for CUDA and may not be imported:
    no instrument of a test computes on such a GPU.
    """
    torch = folder / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise ImportError('there is no GPU to compute on')")
    (torch / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda = '13.0'\n")
    path = folder / "gpus.json"
    alike = {"name": "NVIDIA H100", "memory_bytes": 80 * GIB, "used_bytes": 0, "load": 0}
    path.write_text(json.dumps([{"uuid": f"GPU-{n}"} | alike for n in range(number)]))
    folders = [folder, source, ROOT / "tests" / "fake_nvml", ROOT / "tests" / "plugin"]
    settings = {"DPPROF_FAKE_GPUS": str(path), "PYTHONPATH": os.pathsep.join(map(str, folders))}
    settings |= {"DPPROF_LOCK_DIR": str(folder)}
    others = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return others | settings


def profile_command(output: Path, *options: str) -> list[str]:
    """Return the command that profiles a small experiment."""
    fields = ["--model=tiny", "--method=standard", "--batch-size=1", "--seq-len=4"]
    return spell("profile", f"--output={output}", *fields, *options)
