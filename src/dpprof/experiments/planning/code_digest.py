"""Digests of the source files that a number depends on.

The files are found by following import statements from a measurement's entry point, without
importing anything, so the list is always current. Objects that are looked up by name at run time
(a method, an instrument) are not followed but added. So an edit of one method changes the digest
of that method only. While code is in use, ``CodeInUse`` watches whether it is edited.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dpprof.experiments.config import registry
from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.optimizers import BITSANDBYTES
from dpprof.experiments.planning.job_environment import versions_in_jobs
from dpprof.experiments.planning.stand_ins import StandIn, libraries_of
from dpprof.experiments.records.verdict import BUILT_IN, is_stand_in
from dpprof.system.console import say
from dpprof.system.files import sha256_hex
from dpprof.system.paths import PACKAGE, TEMPLATES

EntryName = tuple[registry.Group, str]
_LAUNCH = PACKAGE / "experiments" / "launch"
_MODELS = PACKAGE / "subjects" / "models"
_COMMANDS = PACKAGE / "ask" / "commands"
ACCOUNTING = PACKAGE / "experiments" / "accounting" / "noise.py"
"""The file that a process of its own runs for the noise of a privacy budget."""

_LEXEMES = re.compile(
    rb"""
    (?P<kept>
        '''(?:\\.|[^\\])*?''' | \"""(?:\\.|[^\\])*?\"""
        | '(?:\\.|[^\\'\n])*' | "(?:\\.|[^\\"\n])*"
    )
    | \n[ \t]*(?:\#[^\n]*)?(?=\n|\Z)
    | [ \t]*\#[^\n]*
    | [ \t]+(?=\n|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
"""Strings, then what does not count: empty lines, comments, and blanks at the end of a line."""


@functools.cache
def without_comments(source: bytes) -> bytes:
    r"""Return a Python source without comments, empty lines and blanks at the end of lines.

    Strings stay as they are, docstrings among them: captions and help texts are made of these. The
    result is the same under every version of Python.

    Example:
        >>> without_comments(b"x = '#'  # a comment\n\n# another\ny = 2\n")
        b"x = '#'\ny = 2\n"
    """
    lines = b"\n" + source.replace(b"\r\n", b"\n").rstrip() + b"\n"
    text = _LEXEMES.sub(lambda match: match["kept"] or b"", lines)
    return text.strip(b"\n") + b"\n"


@functools.cache
def _module_files(module: str) -> list[Path]:
    """Return the files of a dpprof module and of its parent packages."""
    parts = module.split(".")
    if parts[0] != PACKAGE.name:
        return []
    files = []
    for depth in range(len(parts)):
        path = PACKAGE.joinpath(*parts[1 : depth + 1])
        candidates = (path / "__init__.py", path.with_suffix(".py"))
        files += [candidate for candidate in candidates if candidate.is_file()]
    return files


_TYPES_ONLY = re.compile(rb"^([ \t]*)if TYPE_CHECKING:.*\n(?:\1[ \t]+.*\n)+", re.MULTILINE)
_IMPORT = re.compile(
    rb"(?:^|[;:])[ \t]*"
    rb"(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^;\n]*)|import[ \t]+([^;\n]*))",
    re.MULTILINE,
)
_IMPORTED = re.compile(r"([\w.]+)(?:\s+as\s+\w+)?")


@functools.cache
def _imports(source: bytes) -> frozenset[Path]:
    """Return the dpprof files that a file's import statements name.

    Statements under ``if TYPE_CHECKING`` do not count: they never run. A syntax tree would name no
    more, and takes most of the time in which a kept answer is given.
    """
    files: set[Path] = set()
    text = _TYPES_ONLY.sub(b"", without_comments(source).replace(b"\\\n", b""))
    for module, names, modules in _IMPORT.findall(text):
        parent = f"{module.decode()}." if module else ""
        if parent:
            files.update(_module_files(parent.rstrip(".")))
        for name in _IMPORTED.findall((names or modules).decode()):
            files.update(_module_files(parent + name))
    return frozenset(files)


def closure(entries: Iterable[Path]) -> list[Path]:
    """Return all dpprof files that some files import, directly or indirectly.

    The tables of their packages, ``<package>/tables/*.json``, are among them.
    """
    reached: set[Path] = set()
    waiting = list(entries)
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            waiting += _imports(file.read_bytes())
    tables = (folder.glob("tables/*.json") for folder in {file.parent for file in reached})
    return sorted(reached.union(*tables))


@functools.cache
def _digest_source(source: bytes, suffix: str) -> str:
    """Return the digest of what counts of a file: of Python all but comments and empty lines."""
    counts = without_comments(source) if suffix == ".py" else source
    return hashlib.sha256(counts).hexdigest()


def _digest(files: Iterable[Path], *facts: object) -> str:
    total = hashlib.sha256(repr(facts).encode())
    for file in files:
        # The same in a checkout and in a wheel.
        name = file.relative_to(PACKAGE) if file.is_relative_to(PACKAGE) else file.name
        total.update(f"{name}\0{_digest_source(file.read_bytes(), file.suffix)}\n".encode())
    return total.hexdigest()


def file_digest(file: Path) -> str:
    """Return the digest of a dpprof file and all dpprof files that it imports."""
    return _digest(closure([file]))


def read_anew() -> None:
    """Clear the cached digests, so that the next ones read the files again."""
    for cached in (_code_digest, verdict_digest, ceilings_digest):
        cached.cache_clear()


def measuring_files(instrument: str, method: str) -> list[Path]:
    """Return dpprof's own files that affect what an instrument measures of a method.

    These are the files that the worker and its ranks load, and the supervisor with its limits and
    judgements; but not the code that parses options or prints progress.
    """
    entries = [_LAUNCH / name for name in ("worker.py", "supervisor.py")]
    entries += _MODELS.glob("*.py")
    return closure([*entries, *_files_of(("instruments", instrument), ("methods", method))])


def _files_of(*names: EntryName) -> list[Path]:
    return [file for name in names if (file := registry.source_file(*name)) is not None]


def foreign_parts(experiment: Experiment) -> tuple[EntryName, ...]:
    """Return the experiment's model and target, by group and name, if from other packages."""
    named: tuple[tuple[registry.Group, Any], ...]
    named = (("models", experiment.model), ("targets", experiment.target))
    return tuple(
        (group, name)
        for group, name in named
        if isinstance(name, str) and not registry.is_own(group, name)
    )


def code_digest(instrument: str, experiment: Experiment) -> str:
    """Return the digest of what a measurement depends on: sources, torch's and Opacus's versions.

    For an object of another package it covers the object's file and the version of its
    distribution. dpprof's own models count as one.
    """
    libraries = model_libraries(experiment)
    return _code_digest(instrument, experiment.method, foreign_parts(experiment), libraries)


def model_libraries(experiment: Experiment) -> tuple[str, ...]:
    """Return the distributions that a training depends on, besides dpprof, torch and Opacus."""
    in_8_bits = experiment.base_format is not None or experiment.optimizer in BITSANDBYTES
    needed = {
        "transformers": isinstance(experiment.model, Architecture),
        "peft": experiment.lora is not None,
        "bitsandbytes": in_8_bits,
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


@functools.cache
def _code_digest(
    instrument: str, method: str, foreign: tuple[EntryName, ...], libraries: tuple[str, ...]
) -> str:
    files = [*measuring_files(instrument, method), *_files_of(*foreign)]
    named: tuple[EntryName, ...] = (("instruments", instrument), ("methods", method), *foreign)
    return _digest_named(files, *named, libraries=libraries)


def _digest_named(files: Iterable[Path], *names: EntryName, libraries: tuple[str, ...] = ()) -> str:
    """Return the digest of files, and of the versions of torch, Opacus and names' packages."""
    distributions = [registry.distribution_of(*name) for name in names]
    return _digest(files, versions_in_jobs(("torch", "opacus", *libraries)), distributions)


def verified_as(experiment: Experiment) -> str:
    """Return the name of the model that represents an experiment's model in verification.

    Every size of dpprof's own transformer has the same layers, so one size represents all. A
    Hugging Face model has a stand-in, with which its adapters and its padding count.
    """
    stand_in = StandIn.of(experiment)
    return named_in_verdicts(experiment.model) if stand_in is None else stand_in.label


@functools.cache
def named_in_verdicts(model: Any) -> str:
    """Return the name of the model that represents a name or dimensions in verification."""
    own_sizes = _MODELS / "presets.py"
    if isinstance(model, str) and registry.source_file("models", model) != own_sizes:
        return model
    return BUILT_IN


def verifying_files(model: str, method: str) -> list[Path]:
    """Return the files that a verdict depends on.

    They are the method, the models, the references, and the code that combines them.
    """
    entries = [_LAUNCH / "verification_run.py"]
    entries += [PACKAGE / "measure" / "verification" / "verify.py", *_MODELS.glob("*.py")]
    return closure([*entries, *_files_of(*_verified_names(model, method))])


def _verified_names(model: str, method: str) -> list[EntryName]:
    names: list[EntryName] = [("methods", method), ("models", model)]
    return names[:1] if model == BUILT_IN or is_stand_in(model) else names


@functools.cache
def verdict_digest(model: str, method: str) -> str:
    """Return the digest of what a verdict depends on: sources, torch's and Opacus's versions.

    ``model`` is a result of ``verified_as``. Of a stand-in, the versions of transformers and peft
    count too where it needs them; what it is, is part of its name.
    """
    libraries = libraries_of(model) if is_stand_in(model) else ()
    names = _verified_names(model, method)
    return _digest_named(verifying_files(model, method), *names, libraries=libraries)


def limiting_files() -> list[Path]:
    """Return the files that a device's ceilings depend on.

    Which operators were timed is recorded with each of them, so the code of the experiments that
    they are taken from does not count.
    """
    entries = [
        "experiments/launch/ceilings_run.py",
        "measure/devices/limits.py",
        "measure/instruments/replay.py",
    ]
    return closure([PACKAGE / entry for entry in entries])


@functools.cache
def ceilings_digest() -> str:
    """Return the digest of what ceilings depend on: their sources, and torch's version."""
    return _digest(limiting_files(), versions_in_jobs(("torch",)))


def derived_digests() -> dict[str, str]:
    """Return the digests of what tables, each figure and the report depend on, by name.

    An edit of a figure changes only that figure's digest. These digests do not affect
    measurements.
    """
    figures = {
        f"figure-{name}": _digest(closure([_COMMANDS / "figure.py", *_files_of(("figures", name))]))
        for name in registry.names("figures")
    }
    templates = sorted(path for path in TEMPLATES.rglob("*") if path.is_file())
    return figures | {
        "tables": _digest(
            closure([_COMMANDS / "tables.py", ACCOUNTING]), versions_in_jobs(("opacus",))
        ),
        "report": _digest(
            [*closure([_COMMANDS / "report.py"]), *templates],
            versions_in_jobs(("vl-convert-python",)),
        ),
    }


class CodeInUse:
    """Watches source files while they are in use.

    ``digest`` returns the files' digest at the time of the call; ``loaded`` is a module that
    this process has already imported.
    """

    def __init__(self, digest: Callable[[], str], loaded: str) -> None:
        self._digest = digest
        self._digest_of_imported = functools.partial(file_digest, Path(loaded))
        self._imported = self._read(self._digest_of_imported)
        self._at_start = ""

    def start(self) -> None:
        """Mark the moment from which files that are not yet imported may be read."""
        self._at_start = self._read(self._digest)

    def settle(self) -> str:
        """Return the digest of the code that ran.

        If files changed while they were in use, this is unknown. The result is then a digest that
        matches no code, so that the run counts as outdated.
        """
        imported, at_end = self._read(self._digest_of_imported), self._read(self._digest)
        if (imported, at_end) == (self._imported, self._at_start):
            return at_end
        say("code was edited while it was in use; this result counts as outdated")
        return sha256_hex(f"edited: {self._imported} {self._at_start} {imported} {at_end}")

    @staticmethod
    def _read(digest: Callable[[], str]) -> str:
        read_anew()
        try:
            return digest()
        except (OSError, SyntaxError, ValueError) as error:  # half-written or deleted
            return f"unreadable: {error}"
