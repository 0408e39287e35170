"""Reads config files in YAML or JSON, or refuses them in one sentence.

Profiles call ``refuse_config_files``: Snakemake first reads the workflow's profile, and executes
what it declares. Only this comes before it loads a ``--configfile``.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from dpprof.experiments.config.validation import InputError
from dpprof.system.console import printable

MAX_BYTES = 16 * 2**20
MAX_VALUES = 100_000
"""A config may have no more runs than that, so no list needs more values."""

MAX_DEPTH = 50
"""Configs nest five levels deep. Readers recurse per level, and Python limits recursion."""

_TOO_DEEP = f"nests deeper than {MAX_DEPTH} levels, or contains itself"
_TOO_LONG = f"holds more than {MAX_VALUES:,} values"

TEMPLATE_KEY = "__use_yte__"
"""The key that makes Snakemake treat a config as a template, whose expressions it executes."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_ODD_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9_]+(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML 1.1 reads as octal, or as minutes and seconds: 010 is 8, 4:00 is 240."""


def read_config_file(path: Path) -> Any:
    """Read a config file.

    Raises:
        InputError: As ``parse_config_text``, or the file is not text or too large; the message
            names the file.
        OSError: The file cannot be read.
    """
    size_bytes = path.stat().st_size
    if not path.is_file():  # reading a pipe would wait for ever
        raise InputError(f"{path}: is not a file")
    if size_bytes > MAX_BYTES:
        raise InputError(f"{path}: is larger than {MAX_BYTES // 2**20} MiB")
    try:
        return parse_config_text(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text, see byte {error.start + 1:,}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def refuse_config_files(arguments: Sequence[str]) -> None:
    """End the process with an error message if a config file must not be loaded.

    ``arguments`` is Snakemake's command line, which its own parser has accepted.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--configfile", "--configfiles", nargs="+", action="extend", default=[], type=Path
    )
    # Otherwise argparse would read it as --configfile abbreviated.
    parser.add_argument("--config", "-C", nargs="*")
    for path in parser.parse_known_args(arguments)[0].configfile:
        try:
            read_config_file(path)
        except (InputError, OSError) as error:
            sys.exit(f"error: {error}")


def parse_config_text(text: str) -> Any:
    """Parse JSON or YAML as Snakemake does; refuse what it could misread or execute.

    Raises:
        InputError: The text is neither, has a key twice, nests too deep, holds too many values or
            a number that YAML and people read differently, or is a template.
    """
    try:
        value = _parse(text)
    except InputError:
        raise
    except RecursionError:
        raise InputError(_TOO_DEEP) from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"is not YAML: {printable(str(error.problem))}{line}") from None
    except (yaml.YAMLError, ValueError) as error:
        told = printable(" ".join(str(error).split()))
        raise InputError(f"holds a value that cannot be read: {told[:200]}") from None
    if isinstance(value, dict) and TEMPLATE_KEY in value:
        raise InputError(
            f"the key {TEMPLATE_KEY} is not allowed, because Snakemake executes the Python in such "
            "a file; leave it out"
        )
    return value


def _parse(text: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text, object_pairs_hook=_mapping_of)
        except InputError:
            raise
        except ValueError:  # not JSON; a mapping in YAML may begin the same way
            pass
        else:
            _measure_json(value)
            return value
    _measure_text(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _mapping_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping from JSON's pairs; refuse a key that occurs twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        _refuse_twice(key for key, _ in pairs)
    return mapping


def _refuse_twice(keys: Iterable[str], line: int | None = None) -> None:
    """Refuse the first key that occurs twice in a mapping; parsers would silently use the last."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            where = "a mapping" if line is None else f"the mapping that begins in line {line}"
            raise InputError(f"the key {ascii(key)[:80]} occurs twice in {where}; write it once")
        seen.add(key)


def _measure_json(value: Any, depth: int = 1) -> int:
    """Return the number of values, or refuse JSON that is too deep or too long."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if depth > MAX_DEPTH:
        raise InputError(_TOO_DEEP)
    values = 1 + sum(_measure_json(below, depth + 1) for below in inner)
    if values > 2 * MAX_VALUES:
        raise InputError(_TOO_LONG)
    return values


def _measure_text(text: str) -> None:
    """Refuse YAML that is too deep or too long before it is constructed."""
    depth = values = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, yaml.ScalarEvent)
        if depth > MAX_DEPTH:
            raise InputError(_TOO_DEEP)
        if values > MAX_VALUES:
            raise InputError(_TOO_LONG)


def _measure(node: yaml.Node, counted: dict[int, int], depth: int = 1) -> int:
    """Return the number of values below a node, counting aliases at each use.

    Refuses too many values, keys that occur twice, and numbers that YAML misreads.
    """
    if depth > MAX_DEPTH:  # an alias may even contain itself
        raise InputError(_TOO_DEEP)
    if id(node) not in counted:
        below = 1
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBERS and _ODD_NUMBER.fullmatch(node.value):
                raise InputError(
                    f"line {node.start_mark.line + 1}: {node.value[:80]} is not allowed; YAML "
                    "reads it as an octal number or as minutes and seconds, so write a plain number"
                )
        elif isinstance(node, yaml.MappingNode):
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise InputError(f"line {key.start_mark.line + 1}: a key must be a name")
            _refuse_twice((key.value for key, _ in node.value), node.start_mark.line + 1)
            below += sum(_measure(value, counted, depth + 1) for _, value in node.value)
        else:
            below += sum(_measure(value, counted, depth + 1) for value in node.value)
        counted[id(node)] = below
        if below > 2 * MAX_VALUES:
            raise InputError(_TOO_LONG)
    return counted[id(node)]
