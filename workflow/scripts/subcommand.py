"""Run a subcommand of src/dpprof, which scripts beside this file can import, too."""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2] / "src")

if __name__ == "__main__":
    importlib.import_module("dpprof.ask.commands.main").main()
