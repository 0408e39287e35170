"""The Python that jobs find, whether the shell has activated its environment or not."""

import os
import shutil
import sys
from pathlib import Path

from dpprof.spec.validation import InputError


def offer_interpreter() -> None:
    """Put the folder of this process's Python before the PATH that jobs inherit.

    Rules say ``python``, so that an environment of their own can bring one, and that one comes
    first then.

    Raises:
        InputError: There is no program of that name all the same.
    """
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    os.environ["PATH"] = os.pathsep.join(filter(None, folders))
    if shutil.which("python") is None:
        raise InputError(
            f"there is no program named python beside {sys.executable} or on the PATH; activate "
            "the virtual environment, or make a link of that name"
        )
