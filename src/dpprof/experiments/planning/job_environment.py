"""Python, dpprof and the libraries that jobs run with, wherever they start.

Snakemake may live in an environment of its own, where neither torch nor Opacus is installed. Jobs
then run in the environment that ``envs/dpprof.yaml`` pins, and results depend on its versions.
"""

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.records.provenance import package_versions
from dpprof.system.paths import PACKAGE, find_checkout

_PIN = re.compile(r"^\s*-\s*([A-Za-z0-9._-]+)==([^\s#]+)", re.MULTILINE)

_pinned: Mapping[str, str] = {}


def expect_environment(path: Path) -> None:
    """Take versions from the pins of an environment file from now on, not from what is installed.

    Raises:
        InputError: The file pins no torch.
        OSError: The file cannot be read.
    """
    global _pinned  # noqa: PLW0603 (one fact about this process)
    pins = dict(_PIN.findall(path.read_text(encoding="utf-8")))
    if "torch" not in pins:
        raise InputError(f"{path}: pins no torch; add a line such as torch==2.13.0")
    _pinned = pins


def versions_in_jobs(names: Iterable[str]) -> dict[str, str | None]:
    """Return the versions that jobs run with, by library; None where there is none.

    Which build of a version it is, such as ``+cpu``, is left out: a pin does not say.
    """
    wanted = tuple(names)
    versions = _pinned or package_versions(wanted)
    return {name: (versions.get(name) or "").partition("+")[0] or None for name in wanted}


def offer_interpreter() -> None:
    """Let jobs inherit the folder of this process's Python and the sources of this dpprof.

    Rules call ``python``, so that a rule's own environment can provide another Python, which then
    comes first in the PATH. A dpprof that was installed from a wheel is left to the
    environment.

    Raises:
        InputError: There is still no program named python.
    """
    _put_first("PATH", Path(sys.executable).parent)
    if find_checkout() is not None:
        _put_first("PYTHONPATH", PACKAGE.parent)
    if shutil.which("python") is None:
        raise InputError(
            f"there is no program named python beside {sys.executable} or on the PATH; activate "
            "the virtual environment, or create a link of that name"
        )


def _put_first(variable: str, folder: Path) -> None:
    paths = os.environ.get(variable, "").split(os.pathsep)
    others = [path for path in paths if path and path != str(folder)]
    os.environ[variable] = os.pathsep.join([str(folder), *others])


def why_jobs_cannot_run() -> str | None:
    """Return why this Python cannot run what is measured or verified; None if it can."""
    if importlib.util.find_spec("torch") is not None:
        return None
    return (
        f"torch is not installed for {sys.executable}, which would run the jobs; activate the "
        "environment that has it, or let Snakemake make one: snakemake --sdm conda"
    )
