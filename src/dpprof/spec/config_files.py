"""Config files: YAML or JSON, read as they are meant or refused in one sentence."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from dpprof.spec.validation import InputError
from dpprof.system.console import printable

MAX_BYTES = 16 * 2**20
MAX_VALUES = 100_000
"""A config may ask for no more runs than that, so no list needs more."""

MAX_DEPTH = 50
"""Configs nest five deep. Readers call themselves for every level, and Python ends that."""

TEMPLATE_KEY = "__use_yte__"
"""Has Snakemake take a config for a template, whose expressions it executes."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OPENING = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSING = (yaml.MappingEndEvent, yaml.SequenceEndEvent)
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_ODD_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9_]+(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""What YAML 1.1 takes for octal, or for minutes and seconds: 010 is 8, and 4:00 is 240."""


def read_config_file(path: Path) -> Any:
    """Read a config file.

    Raises:
        InputError: As ``parse_config``, or the file is no text, or far too large; names it.
        OSError: It cannot be read.
    """
    size_bytes = path.stat().st_size
    if not path.is_file():  # reading a pipe would wait for ever
        raise InputError(f"{path}: is not a file")
    if size_bytes > MAX_BYTES:
        raise InputError(f"{path}: is larger than {MAX_BYTES // 2**20} MiB")
    try:
        return parse_config_text(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is no text in UTF-8, see byte {error.start + 1:,}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_config_text(text: str) -> Any:
    """Parse JSON or YAML as Snakemake does, but for what could be misread or executed.

    Raises:
        InputError: It is neither, has a key twice, nests too deep, holds too many values or a
            number that YAML reads otherwise than people do, or is a template.
    """
    try:
        value = _parse(text)
    except InputError:
        raise
    except RecursionError:
        raise _refuse_depth() from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"is not YAML: {printable(str(error.problem))}{line}") from None
    except (yaml.YAMLError, ValueError) as error:
        told = printable(" ".join(str(error).split()))
        raise InputError(f"holds what cannot be read: {told[:200]}") from None
    if isinstance(value, dict) and TEMPLATE_KEY in value:
        raise InputError(
            f"the key {TEMPLATE_KEY} is not allowed, since Snakemake executes the Python in such "
            "a file; leave it out"
        )
    return value


def _parse(text: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text, object_pairs_hook=_mapping_of)
        except InputError:
            raise
        except ValueError:  # no JSON; a mapping in YAML may begin so too
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
    """Make a mapping of JSON's pairs, each key once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        _refuse_twice(key for key, _ in pairs)
    return found


def _refuse_twice(keys: Iterable[str], line: int | None = None) -> None:
    """Refuse the first key that comes twice in a mapping; the last would count in silence."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            where = "a mapping" if line is None else f"the mapping that begins in line {line}"
            raise InputError(f"the key {ascii(key)[:80]} is there twice in {where}; write it once")
        seen.add(key)


def _measure_json(value: Any) -> None:
    """Refuse depth and length, which are those of the text: JSON has no aliases."""
    waiting, values = [(value, 1)], 0
    while waiting:
        one, depth = waiting.pop()
        values += 1
        if depth > MAX_DEPTH:
            raise _refuse_depth()
        if values > 2 * MAX_VALUES:
            raise _refuse_length()
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        waiting += [(below, depth + 1) for below in inner]


def _measure_text(text: str) -> None:
    """Refuse depth and length before anything is made of them."""
    depth = values = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, _OPENING) - isinstance(event, _CLOSING)
        values += isinstance(event, yaml.ScalarEvent)
        if depth > MAX_DEPTH:
            raise _refuse_depth()
        if values > MAX_VALUES:
            raise _refuse_length()


def _measure(node: yaml.Node, known: dict[int, int], depth: int = 1) -> int:
    """Count the values below a node, those of aliases as often as they are named.

    Refuses what comes of it, keys that come twice, and numbers that are misread.
    """
    if depth > MAX_DEPTH:  # an alias may even stand for what it is in
        raise _refuse_depth()
    if id(node) not in known:
        below = 1
        if isinstance(node, yaml.ScalarNode):
            _refuse_odd_number(node)
        elif isinstance(node, yaml.MappingNode):
            _refuse_twice((_key_of(key) for key, _ in node.value), node.start_mark.line + 1)
            below += sum(_measure(value, known, depth + 1) for _, value in node.value)
        else:
            below += sum(_measure(value, known, depth + 1) for value in node.value)
        known[id(node)] = below
        if below > 2 * MAX_VALUES:
            raise _refuse_length()
    return known[id(node)]


def _key_of(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise InputError(f"line {node.start_mark.line + 1}: a key must be a name")
    return str(node.value)


def _refuse_odd_number(node: yaml.ScalarNode) -> None:
    if node.tag in _NUMBERS and _ODD_NUMBER.fullmatch(node.value):
        raise InputError(
            f"line {node.start_mark.line + 1}: {node.value[:80]} is not allowed; YAML reads it as "
            "an octal number or as minutes and seconds, so write a plain number"
        )


def _refuse_depth() -> InputError:
    return InputError(f"nests deeper than {MAX_DEPTH} levels, or is part of itself")


def _refuse_length() -> InputError:
    return InputError(f"holds more than {MAX_VALUES:,} values")
