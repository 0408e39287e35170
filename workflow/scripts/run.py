"""Run a subcommand of dpprof from this checkout, whether it is installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from dpprof.cli.main import main

main()
