"""Where dpprof itself lies."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package."""

CHECKOUT = PACKAGE.parents[1]
"""The folder of the repository, where the package lies in one."""
