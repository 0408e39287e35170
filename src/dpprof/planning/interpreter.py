"""Makes jobs find this Python, even if the shell has not activated its environment."""

import os
import shutil
import sys
from pathlib import Path

from dpprof.spec.validation import InputError


def offer_interpreter() -> None:
    """Put the folder of this process's Python first in the PATH that jobs inherit.

    Rules call ``python``, so that a rule's own environment can provide another one, which then
    comes first.

    Raises:
        InputError: There is still no program of that name.
    """
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    os.environ["PATH"] = os.pathsep.join(filter(None, folders))
    if shutil.which("python") is None:
        raise InputError(
            f"there is no program named python beside {sys.executable} or on the PATH; activate "
            "the virtual environment, or create a link of that name"
        )
