"""The versions of libraries that jobs run with, which results depend on.

Snakemake may live in an environment of its own, where neither torch nor Opacus is installed. Jobs
then run in the environment that ``envs/dpprof.yaml`` pins.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dpprof.records.provenance import package_versions
from dpprof.spec.validation import InputError

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
    found = _pinned or package_versions(wanted)
    return {name: (found.get(name) or "").partition("+")[0] or None for name in wanted}
