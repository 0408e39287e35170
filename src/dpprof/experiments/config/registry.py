"""The registry of names: models, methods, instruments, targets and figures, by entry point.

dpprof declares its own names in its pyproject.toml, exactly as other packages declare more. A
look-up imports nothing that the names refer to, so planning needs no torch.
"""

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from dpprof.experiments.config.architecture import PREFIX, bundled_names
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.naming import is_code
from dpprof.experiments.config.target import Target
from dpprof.experiments.config.validation import one_of, refuse
from dpprof.experiments.config.varying import list_variations
from dpprof.private.errors import UnsupportedError
from dpprof.system.hardware import available_cores, interchangeable_gpus, why_no_cuda
from dpprof.system.paths import find_checkout

PREDICTIONS = ("estimate", "capacity")
"""Instruments that run nothing: they need no device, and several may run at once."""


Group = Literal["models", "methods", "instruments", "figures", "targets"]

NAMING: dict[str, Group] = {
    "model": "models",
    "method": "methods",
    "target": "targets",
    "instruments": "instruments",
}
"""Keys whose values must be names in the registry, with the group of each."""


class EntryPointError(ImportError):
    """An entry point's object does not exist, or is not what its group requires.

    ``problem`` says what is wrong, in words that follow "which".
    """

    def __init__(self, group: Group, name: str, problem: str) -> None:
        entry, declared_by = _entry(group, name), distribution_of(group, name)
        super().__init__(
            f"the model is {name}, which {problem}"
            if is_code(name)
            else f"the entry point {name!r} of {declared_by} in dpprof.{group} names "
            f"{entry.value}, which {problem}"
        )


@functools.cache
def _entries(group: Group) -> dict[str, EntryPoint]:
    """Return the entry points of a group; in a checkout dpprof's own come from its pyproject.toml.

    Because the file is read, and not only the installed metadata, scripts run from a checkout that
    was never installed, and a new line counts at once.
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


_lent: dict[str, Callable[[Experiment], Any]] = {}
"""Functions of this process that build models, by name; no other process has them."""

_count = itertools.count(1)
_numbers: WeakKeyDictionary[Callable[[Experiment], Any], int] = WeakKeyDictionary()
"""A number for each such function, which no other one gets."""


@contextlib.contextmanager
def lent(build: Callable[[Experiment], Any]) -> Iterator[str]:
    """Give a function of this process that builds a model its name, within this context."""
    if build not in _numbers:
        _numbers[build] = next(_count)
    told = re.sub(r"\W", "_", getattr(build, "__name__", "model"))
    name = f"here:{told.strip('_')[:60]}_{_numbers[build]}"
    _lent[name] = build
    try:
        yield name
    finally:
        _lent.pop(name, None)


def is_lent(model: Any) -> bool:
    """Return whether a model is built by a function that only this process has."""
    return isinstance(model, str) and model in _lent


def _entry(group: Group, name: str) -> EntryPoint:
    """Return a name's entry point; a function of the user's own is one."""
    if group == "models" and is_code(name):
        return EntryPoint(name, name, f"dpprof.{group}")
    return _entries(group)[name]


def _declared_here(entry: EntryPoint) -> bool:
    return entry.module.partition(".")[0] == "dpprof"


def is_own(group: Group, name: str) -> bool:
    """Return whether a name is dpprof's own and not another package's."""
    return _declared_here(_entry(group, name))


def names(group: Group) -> list[str]:
    """Return the names of a group, sorted."""
    return sorted(_entries(group))


def modules(group: Group, of: Iterable[str]) -> list[str]:
    """Return the modules that names refer to."""
    return [_entry(group, name).module for name in of]


def names_by_key() -> dict[str, list[str]]:
    """Return the allowed names by key of a config or an experiment."""
    return {key: _allowed(group) for key, group in NAMING.items()}


def _allowed(group: Group) -> list[str]:
    """Return the names of a group; of models, the bundled ones of Hugging Face too."""
    bundled = bundled_names() if group == "models" else []
    return [*names(group), *(f"{PREFIX}{name}" for name in bundled)]


def check(group: Group, name: str, key: str) -> None:
    """Refuse a name that no package declares.

    Raises:
        InputError: The name does not exist; the message names key, value and existing names.
    """
    if group == "models" and is_code(name):
        if not is_lent(name) and source_file(group, name) is None:
            raise refuse(key, name, "there is no such module, here or installed")
    elif name not in _entries(group):
        raise refuse(key, name, one_of(_allowed(group), name))


def refuse_target(experiment: Experiment, instrument: str, key: str) -> None:
    """Refuse a target for an instrument that measures this machine.

    Raises:
        InputError: The instrument takes no target; the message names key, target and the
            instruments that take one.
    """
    if experiment.target is not None and instrument not in PREDICTIONS:
        allowed = (
            f"the instrument {instrument} measures this machine and takes no target; "
            f"instruments with a target: {', '.join(PREDICTIONS)}"
        )
        raise refuse(key, experiment.target, allowed)


def load(group: Group, name: str) -> Any:
    """Return the object that a name refers to, after importing it.

    The module of the user's own code may be in the working folder, which comes last on the search
    path from then on.

    Raises:
        EntryPointError: It cannot be imported; the message names its package and the reason.
        UnsupportedError: The imported module raises it.
    """
    if name in _lent:
        return _lent[name]
    entry = _entry(group, name)
    if is_code(name) and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return entry.load()
    except (MemoryError, UnsupportedError):
        raise
    except Exception as error:
        why = f"cannot be imported: {type(error).__name__}: {error}"
        raise EntryPointError(group, name, why) from error


def find_gpu(target: Target | str | None) -> Target | None:
    """Return a GPU by a target's name or description; None for a processor or an unknown name."""
    if isinstance(target, str):
        target = load("targets", target) if target in names("targets") else None
    return target if isinstance(target, Target) else None


def source_file(group: Group, name: str) -> Path | None:
    """Return the file of a name's module, without importing it.

    None where the module is not a plain Python file or is not installed.

    Raises:
        InputError: Nothing has this name here, as where the package of a result is not installed.
    """
    if not is_code(name):
        check(group, name, group)
    top, *rest = _entry(group, name).module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None and is_code(name):
        spec = PathFinder.find_spec(top, [str(Path.cwd())])
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin)
    path = Path(spec.origin).parent.joinpath(*rest)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def caption(group: Group, name: str) -> str:
    """Return the docstring of a name's object, up to its arguments, without importing it."""
    file = source_file(group, name)
    if file is None:
        return name
    wanted = _entry(group, name).attr
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == wanted:
            text = ast.get_docstring(node) or name
            return " ".join(text.partition("\nArgs:")[0].split())
    return name


def distribution_of(group: Group, name: str) -> str:
    """Return the distribution and version that declare a name; ``dpprof`` for its own.

    Its own version follows from the commit, and says nothing that its sources do not say.
    """
    entry = _entry(group, name)
    if entry.dist is None or _declared_here(entry):
        return "dpprof"
    return f"{entry.dist.name} {entry.dist.version}"


_RANKS_OF_A_CORE = 8
"""Each rank is a process with its own libraries; more would only wait for each other."""

ON_RANKS = ("clean", "phases", "memory", *PREDICTIONS)
"""Instruments that several ranks have; each rank runs them."""


def why_unsupported(experiment: Experiment, instrument: str) -> str | None:
    """Return why a combination of valid values cannot run; None where it can.

    This checks what holds for every method. A method with limits of its own raises
    ``UnsupportedError`` when it is built.
    """
    if experiment.dtype == "tf32" and experiment.device != "cuda":
        return "dtype tf32 is a mode of CUDA matrix products and does not exist on cpu"
    if experiment.target is None and experiment.device == "cuda" and (reason := why_no_cuda()):
        return f"device cuda cannot be used here: {reason}"
    if experiment.execution != "eager" and (reason := _why_not_executed(experiment, instrument)):
        return reason
    varied = list_variations(experiment)
    if varied and is_own("instruments", instrument) and instrument != "estimate":
        return (
            f"the instrument {instrument} is of batches that are all alike, and "
            f"{' and '.join(varied)} would vary them; leave that out, or ask estimate"
        )
    return None if experiment.parallel is None else _why_no_ranks(experiment, instrument)


def _why_not_executed(experiment: Experiment, instrument: str) -> str | None:
    if experiment.execution == "compiled" and instrument in PREDICTIONS:
        return (
            "what a compiler makes of a step is not predicted; measure it (dpprof profile), or the "
            "closest: execution eager"
        )
    if is_own("instruments", instrument) and instrument not in ("clean", *PREDICTIONS):
        return (
            f"the instrument {instrument} looks into steps that Python runs; execution "
            f"{experiment.execution} has clean"
        )
    return None


def _why_no_ranks(experiment: Experiment, instrument: str) -> str | None:
    if is_own("instruments", instrument) and instrument not in ON_RANKS:
        names = ", ".join(ON_RANKS)
        return f"the instrument {instrument} runs on one process; several ranks have {names}"
    if instrument in PREDICTIONS:
        return None
    number = experiment.world_size
    if experiment.device == "cuda":
        gpus = len(interchangeable_gpus())
        few = f"{number} ranks need {number} GPUs of one kind, and there are {gpus}"
        return few if gpus < number else None
    most = _RANKS_OF_A_CORE * available_cores()
    many = f"{number} ranks are too many for this processor, which takes {most}"
    return many if number > most else None
