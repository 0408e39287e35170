"""Make src/dpprof importable for the scripts beside this file, and run subcommands of it."""

import importlib
import sys
from pathlib import Path

# In place of this folder: its profile.py and its tables.py are for the command line alone, and the
# standard library has a module ``profile`` of its own.
sys.path[0] = str(Path(__file__).resolve().parents[2] / "src")


def run(command: str) -> None:
    """Run the module of a subcommand."""
    importlib.import_module("dpprof.ask.commands.main").import_command(command).main()
