"""Run a subcommand of the dpprof in src, which need not be installed."""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2] / "src")  # in place of this folder

if __name__ == "__main__":
    importlib.import_module("dpprof.cli.main").main()
