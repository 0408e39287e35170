"""The paths of dpprof itself."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package."""

CHECKOUT = PACKAGE.parents[1]
"""The folder of the repository, if the package is in one."""
