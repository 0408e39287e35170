"""The example plug-in, installed as a user would install it."""

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent / "example_plugin"


def install_example(folder: Path) -> Path:
    """Install tests/example_plugin with pip; returns the folder for PYTHONPATH."""
    source = folder / "source"
    shutil.copytree(EXAMPLE, source)  # building leaves files behind
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--quiet", "--no-cache-dir"]
    installed = folder / "installed"
    subprocess.run([*command, "--target", str(installed), str(source)], check=True)
    return installed
