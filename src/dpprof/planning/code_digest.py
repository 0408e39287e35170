"""Which source files a number rests on, as one digest.

The files are found by following import statements from where a measurement starts,
without importing anything, so the list cannot go stale. What is looked up by name at
run time (a method, an instrument) is not followed but added: that is why editing one
method changes the digest of that method alone.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dpprof.records.provenance import package_versions
from dpprof.records.verdict import BUILT_IN
from dpprof.spec import registry
from dpprof.spec.experiment import Dimensions, Experiment
from dpprof.system.paths import PACKAGE, TEMPLATES

_COMMANDS = PACKAGE / "cli"


def _module_files(module: str) -> list[Path]:
    """Find the files of a dpprof module and of the packages above it."""
    parts = module.split(".")
    if parts[0] != PACKAGE.name:
        return []
    files = []
    for depth in range(len(parts)):
        path = PACKAGE.joinpath(*parts[1 : depth + 1])
        candidates = (path / "__init__.py", path.with_suffix(".py"))
        files += [candidate for candidate in candidates if candidate.is_file()]
    return files


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """List the nodes of a module but those under ``if TYPE_CHECKING``, which never run."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


@functools.cache
def _imports(source: bytes) -> frozenset[Path]:
    """Find the dpprof files that a file's import statements name."""
    found: set[Path] = set()
    for node in _run_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.update(_module_files(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update(_module_files(node.module))
            for alias in node.names:
                found.update(_module_files(f"{node.module}.{alias.name}"))
    return frozenset(found)


def closure(entries: Iterable[Path]) -> list[Path]:
    """Follow imports inside dpprof from some files to all that they reach."""
    reached: set[Path] = set()
    waiting = list(entries)
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            waiting += _imports(file.read_bytes())
    return sorted(reached)


def _digest(files: Iterable[Path], *facts: object) -> str:
    total = hashlib.sha256(repr(facts).encode())
    for file in files:
        # The same in a checkout and in a wheel.
        name = file.relative_to(PACKAGE) if file.is_relative_to(PACKAGE) else file.name
        total.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def file_digest(file: Path) -> str:
    """Digest a file of dpprof's with all that it imports of dpprof."""
    return _digest(closure([file]))


def read_anew() -> None:
    """Let the next digests be of the files as they are then; planning has each digest once."""
    for cached in (_code_digest, verdict_digest, ceilings_digest):
        cached.cache_clear()


def measuring_files(instrument: str, method: str) -> list[Path]:
    """List dpprof's own files that matter to what an instrument measures of a method.

    Beside what the worker loads, that is the supervisor with its limits and judgements; not
    what parses options or tells progress.
    """
    entries = [PACKAGE / "launch" / "worker.py", PACKAGE / "launch" / "supervisor.py"]
    entries += sorted((PACKAGE / "models").glob("*.py"))
    named = (
        registry.source_file("instruments", instrument),
        registry.source_file("methods", method),
    )
    return closure([*entries, *(file for file in named if file is not None)])


def foreign_parts(experiment: Experiment) -> tuple[tuple[registry.Group, str], ...]:
    """List the experiment's model and target, by group and name, where others provide them."""
    named: list[tuple[registry.Group, Any]] = [
        ("models", experiment.model),
        ("targets", experiment.target),
    ]
    return tuple(
        (group, name)
        for group, name in named
        if isinstance(name, str) and not registry.is_own(group, name)
    )


def code_digest(instrument: str, experiment: Experiment) -> str:
    """Digest what a measurement depends on: its sources, torch's and Opacus's versions.

    For what another package provides this covers its file and the version of the
    distribution that declares it. Our own models count as one.
    """
    return _code_digest(instrument, experiment.method, foreign_parts(experiment))


@functools.cache
def _code_digest(
    instrument: str, method: str, foreign: tuple[tuple[registry.Group, str], ...]
) -> str:
    names: list[tuple[registry.Group, str]] = [
        ("instruments", instrument),
        ("methods", method),
        *foreign,
    ]
    files = measuring_files(instrument, method)
    files += filter(None, [registry.source_file(*part) for part in foreign])
    return _digest(
        files,
        package_versions(("torch", "opacus")),
        [registry.distribution_of(group, name) for group, name in names],
    )


@functools.cache
def verified_as(model: str | Dimensions) -> str:
    """Name the model that stands for another when a method is verified on it.

    Every size of dpprof's own transformer has the same layers, so one stands for all.
    """
    own_sizes = PACKAGE / "models" / "presets.py"
    if isinstance(model, str) and registry.source_file("models", model) != own_sizes:
        return model
    return BUILT_IN


def verifying_files(model: str, method: str) -> list[Path]:
    """List the files that a verdict rests on.

    They are the method, the models, the references, and what puts them together.
    """
    entries = [PACKAGE / "launch" / "verification_run.py"]
    entries += [*(PACKAGE / "verification").glob("*.py"), *(PACKAGE / "models").glob("*.py")]
    named = [registry.source_file("methods", method)]
    if model != BUILT_IN:
        named.append(registry.source_file("models", model))
    return closure([*entries, *(file for file in named if file is not None)])


@functools.cache
def verdict_digest(model: str, method: str) -> str:
    """Digest what a verdict depends on: its sources, torch's and Opacus's versions.

    Args:
        model: Of ``verified_as``.
        method: A method's name.
    """
    names: list[tuple[registry.Group, str]] = [("methods", method)]
    names += [("models", model)] if model != BUILT_IN else []
    return _digest(
        verifying_files(model, method),
        package_versions(("torch", "opacus")),
        [registry.distribution_of(group, name) for group, name in names],
    )


def limiting_files() -> list[Path]:
    """List the files that a device's ceilings rest on."""
    entries = [PACKAGE / "launch" / "ceilings_run.py", PACKAGE / "devices" / "limits.py"]
    return closure(entries)


@functools.cache
def ceilings_digest() -> str:
    """Digest what ceilings depend on: their sources, and torch's version."""
    return _digest(limiting_files(), package_versions(("torch",)))


def derived_digests() -> dict[str, str]:
    """Digest what tables, each figure and the report depend on, by the name of the digest.

    Editing a figure changes that figure's digest alone; nothing here touches a
    measurement.
    """
    figures = {
        f"figure-{name}": _digest(closure([_COMMANDS / "figure.py", *_files_of(name)]))
        for name in registry.names("figures")
    }
    templates = sorted(TEMPLATES.iterdir())
    return figures | {
        "tables": _digest(closure([_COMMANDS / "tables.py"])),
        "report": _digest([*closure([_COMMANDS / "report.py"]), *templates]),
    }


def _files_of(figure: str) -> list[Path]:
    file = registry.source_file("figures", figure)
    return [] if file is None else [file]
