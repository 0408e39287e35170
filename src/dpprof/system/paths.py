"""The paths of dpprof itself."""

import functools
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package."""

TEMPLATES = PACKAGE / "results" / "report" / "templates"
"""The folder of what lays out reports."""


@functools.cache
def find_checkout() -> Path | None:
    """Return the folder of the repository; None where the package was installed from a wheel."""
    folder = PACKAGE.parents[1]
    declaration = folder / "pyproject.toml"
    if not declaration.is_file():
        return None
    project = tomllib.loads(declaration.read_text(encoding="utf-8")).get("project", {})
    return folder if project.get("name") == "dpprof" else None
