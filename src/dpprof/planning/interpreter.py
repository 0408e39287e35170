"""Makes jobs find Python and dpprof, wherever they start and whatever the shell has activated."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from dpprof.spec.validation import InputError
from dpprof.system.paths import PACKAGE, find_checkout


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
    known = os.environ.get(variable, "").split(os.pathsep)
    others = [one for one in known if one and one != str(folder)]
    os.environ[variable] = os.pathsep.join([str(folder), *others])


def why_jobs_cannot_run() -> str | None:
    """Return why this Python cannot run what is measured or verified; None if it can."""
    if importlib.util.find_spec("torch") is not None:
        return None
    return (
        f"torch is not installed for {sys.executable}, which would run the jobs; activate the "
        "environment that has it, or let Snakemake make one: snakemake --sdm conda"
    )
