"""Bad input in one sentence: which key, which value, what is allowed."""

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

NAME_TAG, DIMENSIONS_TAG, TARGET_TAG = "<name>", "<dimensions>", "<target>"
"""How the ways to write a model or a target are told apart; pydantic puts them into locations."""

_NOT_KEYS = (NAME_TAG, DIMENSIONS_TAG, TARGET_TAG, "[key]")

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


class InputError(ValueError):
    """Something the user wrote cannot be meant; the message says what is allowed."""


def refuse(key: str, value: Any, allowed: str) -> InputError:
    """Make the one sentence that every refusal has.

    Control characters in the value are escaped, so it cannot disturb a terminal.
    """
    return InputError(f"{key}: {_repr.repr(value)} is not allowed; {allowed}")


def one_of(names: Iterable[str], value: Any = None) -> str:
    """List what is allowed, with the nearest name first where a typo is likely."""
    ordered = sorted(names)
    text = f"allowed: {', '.join(ordered)}" if ordered else "nothing is allowed here"
    near = difflib.get_close_matches(value, ordered, n=1) if isinstance(value, str) else []
    return f"did you mean {near[0]!r}? {text}" if near else text


def _key(location: Sequence[int | str]) -> str:
    """Join a pydantic location into a dotted key, without list positions and union tags."""
    parts = [part for part in location if isinstance(part, str) and part not in _NOT_KEYS]
    return ".".join(ascii(part)[1:-1] for part in parts)


def _allowed_keys(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Find the keys that the mapping at a location may have."""
    current: Any = model
    for part in location:
        if isinstance(part, int) or part in _NOT_KEYS:
            continue
        field = current.model_fields.get(part) if _is_model(current) else None
        current = _inner_model(field.annotation) if field else current
    return sorted(current.model_fields) if _is_model(current) else []


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _inner_model(annotation: Any) -> Any:
    """Find the model inside ``Model``, ``list[Model]``, ``dict[str, Model]`` or a union."""
    if _is_model(annotation):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        inner = _inner_model(argument)
        if inner is not None:
            return inner
    return None


def explain(error: ValidationError, model: type[BaseModel], *, options: bool = False) -> InputError:
    """Turn pydantic's report into one sentence per problem.

    Args:
        error: What pydantic found.
        model: The model that was validated, for the keys it allows.
        options: Spell keys as command-line options, ``--batch-size`` for ``batch_size``.
    """
    missing: dict[str, list[str]] = {}
    sentences = []
    for problem in error.errors(include_url=False):
        location = problem["loc"]
        key, parent = _key(location), _key(location[:-1])
        if problem["type"] == "extra_forbidden":
            unknown = str(location[-1])
            allowed = one_of(_allowed_keys(model, location[:-1]), unknown)
            where = f" in {parent}" if parent else ""
            sentences.append(f"unknown key {unknown!r}{where}; {allowed}")
        elif problem["type"] == "missing":
            missing.setdefault(parent, []).append(str(location[-1]))
        else:
            message = problem["msg"].removeprefix("Value error, ")
            message = re.sub(r"^(Input|String|List|Dictionary) should", "it must", message)
            message = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", message)
            message = message.removesuffix(" after validation, not 0")
            spelled = option_name(key) if options else key
            sentences.append(str(refuse(spelled or "the configuration", problem["input"], message)))
    for parent, names in missing.items():
        if parent:
            where = option_name(parent) if options else parent
            sentences.append(f"{where}: missing {', '.join(names)}")
        else:
            sentences.append(f"missing: {', '.join(map(option_name, names) if options else names)}")
    return InputError("\n".join(dict.fromkeys(sentences)))


def option_name(key: str) -> str:
    """Spell a key as a command-line option; only its first part is one."""
    first, dot, rest = key.partition(".")
    return f"--{first.replace('_', '-')}{dot}{rest}"
