"""Lines for the person at the terminal."""

import os
import sys
from pathlib import Path


def say(text: str) -> None:
    """Print a line to standard error; a terminal that is gone fails nothing, now or at exit."""
    try:
        print(f"dpprof: {text}", file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the end)
