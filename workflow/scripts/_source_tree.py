"""Make src/dpprof importable for the scripts beside this file, and run subcommands of it."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))


def run(command: str) -> None:
    """Run the module of a subcommand."""
    importlib.import_module(f"dpprof.cli.{command}").main()
