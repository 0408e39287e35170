"""The names that exist: models, methods, instruments, targets and figures, by entry point.

dpprof declares its own in its pyproject.toml, exactly as another package would
declare more. Looking names up imports nothing that they name, so planning needs
no torch.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

from dpprof.spec.experiment import Experiment
from dpprof.spec.validation import one_of, refuse
from dpprof.system.hardware import why_no_cuda
from dpprof.system.paths import find_checkout

PREDICTIONS = ("estimate", "capacity")
"""Instruments that run nothing: they need no device, and may run beside one another."""


class UnsupportedError(Exception):
    """A combination of valid values that cannot run, here or at all; says why."""


Group = Literal["models", "methods", "instruments", "figures", "targets"]


NAMING: dict[str, Group] = {
    "model": "models",
    "method": "methods",
    "target": "targets",
    "instruments": "instruments",
}
"""Keys whose values name something that the registry must know."""


RENAMED: dict[tuple[Group, str], str] = {("instruments", "ledger"): "memory"}
"""Names that were given up, and those that took their place."""


class EntryPointError(ImportError):
    """What a name stands for is not there, or is not what its group asks for.

    Args:
        group: Where the name is declared.
        name: The name.
        problem: What is wrong, in words that follow "which".
    """

    def __init__(self, group: Group, name: str, problem: str) -> None:
        entry, declared_by = _entries(group)[name], distribution_of(group, name)
        super().__init__(
            f"the entry point {name!r} of {declared_by} in dpprof.{group} names {entry.value}, "
            f"which {problem}"
        )


@functools.cache
def _entries(group: Group) -> dict[str, EntryPoint]:
    """Collect the entry points of a group; in a checkout its pyproject.toml is the truth.

    Reading the file, and not only the installed metadata, lets scripts run from a
    checkout that was never installed, and makes a new line count at once.
    """
    full = f"dpprof.{group}"
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=full)}
    checkout = find_checkout()
    if checkout is not None:
        text = (checkout / "pyproject.toml").read_text(encoding="utf-8")
        own = tomllib.loads(text)["project"].get("entry-points", {}).get(full, {})
        entries = {name: entry for name, entry in entries.items() if not _declared_here(entry)}
        entries |= {name: EntryPoint(name, target, full) for name, target in own.items()}
    return entries


def _declared_here(entry: EntryPoint) -> bool:
    return entry.module.partition(".")[0] == "dpprof"


def is_own(group: Group, name: str) -> bool:
    """Tell whether a name is dpprof's own and not another package's."""
    return _declared_here(_entries(group)[name])


def names(group: Group) -> list[str]:
    """List what a group offers."""
    return sorted(_entries(group))


def names_by_key() -> dict[str, list[str]]:
    """List, by a config's or an experiment's key, the names that its values may be."""
    return {key: names(group) for key, group in NAMING.items()}


def check(group: Group, name: str, key: str) -> None:
    """Refuse a name that nobody declares.

    Raises:
        InputError: Names the key, the value and the names that exist.
    """
    if (group, name) in RENAMED:
        raise refuse(key, name, f"it is called {RENAMED[group, name]} now")
    if name not in _entries(group):
        raise refuse(key, name, one_of(names(group), name))


def refuse_target(experiment: Experiment, instrument: str, key: str) -> None:
    """Refuse a target for an instrument that measures what is there.

    Raises:
        InputError: Names the key, the target, and the instruments that take one.
    """
    if experiment.target is not None and instrument not in PREDICTIONS:
        allowed = (
            f"the instrument {instrument} measures what is here, and a target need not be; "
            f"instruments with a target: {', '.join(PREDICTIONS)}"
        )
        raise refuse(key, experiment.target, allowed)


def load(group: Group, name: str) -> Any:
    """Import what a name stands for.

    Raises:
        EntryPointError: It cannot be imported; says whose it is and why.
        UnsupportedError: So it says itself, as it is imported.
    """
    entry = _entries(group)[name]
    try:
        return entry.load()
    except (MemoryError, UnsupportedError):
        raise
    except Exception as error:
        why = f"cannot be imported: {type(error).__name__}: {error}"
        raise EntryPointError(group, name, why) from error


def source_file(group: Group, name: str) -> Path | None:
    """Find the file that a name's module lives in, without importing it.

    Returns:
        None where the module is no plain Python file, or is not installed.
    """
    top, *rest = _entries(group)[name].module.split(".")
    found = importlib.util.find_spec(top)
    if found is None or found.origin is None:
        return None
    if not rest:
        return Path(found.origin)
    path = Path(found.origin).parent.joinpath(*rest)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def caption(group: Group, name: str) -> str:
    """Read the docstring of what a name stands for, up to its arguments, without importing it."""
    file = source_file(group, name)
    if file is None:
        return name
    wanted = _entries(group)[name].attr
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == wanted:
            text = ast.get_docstring(node) or name
            return " ".join(text.partition("\nArgs:")[0].split())
    return name


def distribution_of(group: Group, name: str) -> str:
    """Name the distribution and version that declares a name, ``dpprof`` for our own."""
    distribution = _entries(group)[name].dist
    return f"{distribution.name} {distribution.version}" if distribution else "dpprof"


def why_unsupported(experiment: Experiment) -> str | None:
    """Say why a combination of valid values cannot run, or return None where it can.

    Knows what holds for every method; a method that has limits of its own raises
    ``UnsupportedError`` when it is built.
    """
    if experiment.dtype == "tf32" and experiment.device != "cuda":
        return "dtype tf32 is a mode of CUDA matrix products and does not exist on cpu"
    if experiment.target is None and experiment.device == "cuda" and (reason := why_no_cuda()):
        return f"device cuda cannot be used here: {reason}"
    return None
