"""Counts what makes source hard to read: long functions and files, empty names, helpers."""

import ast
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EMPTY = ("one", "found", "known", "given")
"""Names that say nothing of what they name."""

LINES, FILE_LINES, METHODS, HELPER_LINES = 60, 400, 15, 5


class House(NamedTuple):
    """Places, by what is too much there."""

    long_functions: list[str]
    long_files: list[str]
    large_classes: list[str]
    one_use_helpers: list[str]
    empty_names: Counter[str]
    """Uses of each of ``EMPTY``, by file."""


def survey(folder: Path = ROOT / "src" / "dpprof") -> House:
    """Count over all modules of a folder."""
    house = House([], [], [], [], Counter())
    for file in sorted(folder.rglob("*.py")):
        text, name = file.read_text(encoding="utf-8"), str(file.relative_to(folder))
        if len(text.splitlines()) > FILE_LINES:
            house.long_files.append(name)
        tree = ast.parse(text)
        uses = Counter(_names(tree))
        house.empty_names[name] += sum(uses[empty] for empty in EMPTY)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > LINES:
                    house.long_functions.append(f"{name}: {node.name} {lines}")
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(part, ast.FunctionDef) for part in node.body)
                if methods > METHODS:
                    house.large_classes.append(f"{name}: {node.name} {methods}")
        house.one_use_helpers.extend(
            f"{name}: {helper.name}" for helper in _helpers(tree) if uses[helper.name] == 1
        )
    return house


def _names(tree: ast.AST) -> list[str]:
    """Return every use of a name: variables, arguments, attributes, keywords."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.append(node.id)
        elif isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            names.append(node.arg)
    return names


def _helpers(tree: ast.AST) -> list[ast.FunctionDef]:
    """Return the private functions and methods whose bodies have few lines, without decorators."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("_")
        and not node.name.startswith("__")
        and not node.decorator_list
        and (node.end_lineno or 0) - node.lineno + 1 <= HELPER_LINES
    ]


if __name__ == "__main__":
    for title, places in survey()._asdict().items():
        if isinstance(places, Counter):
            print(title, sum(places.values()))
            print(*(f"  {file} {count}" for file, count in places.most_common(25)), sep="\n")
        else:
            print(title, len(places), *places, sep="\n  ")
