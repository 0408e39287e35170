"""Error messages for bad input: one sentence with the key, the value and what is allowed."""

import contextlib
import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dpprof.system.files import read_json

_CLOSEST: Mapping[tuple[str, str], str] = {
    ("quantization", "gptq|awq|hqq|4bit"): "nf4, whose weights have 4 bits too, and a scale for 64",
    ("quantization", "8bit"): "int8",
    ("dtype", "fp8|float8"): "bfloat16: float8 spares time, and keeps activations in 16 bits",
    ("dtype", "bf16"): "bfloat16",
    ("dtype", "fp16|half"): "float16",
    ("head", "liger|unsloth|fused|cut"): "chunked, which has no logits of all tokens either",
    ("loss", "liger|unsloth|fused|cut"): "head chunked, which has no logits of all tokens either",
    ("attention", "flash|xformers|flex"): "sdpa, by which PyTorch takes its own flash attention",
    ("parallel", "fsdp1|yafsdp|zero|deepspeed"): "fsdp, PyTorch's FSDP2, without buffers of whole "
    "groups",
    ("padding", "pack"): "packed",
    ("padding", "length|bucket|longest"): "lengths, with the share of batches of each",
    ("task", "qa|span|squad"): "question-answering",
    ("task", "dpo|grpo|kto|orpo|ppo|reward|preference"): "causal-lm, where a pair is two samples, "
    "without a reference's weights",
    ("loss", "dpo|grpo|kto|orpo|ppo|reward|preference"): "cross-entropy, where a pair is two "
    "samples, without a reference's weights",
    ("task", "choice"): "sequence-classification, where a choice is a sample",
    ("loop", "trl|sft|axolotl|unsloth"): "hf-trainer, of which it is a subclass",
    ("loop", "accelerate|lightning|fabric"): "hf-manual, a loop over a Hugging Face model",
    ("task", "speech|audio"): "seq2seq-lm, of a model of text with the same sizes",
    ("lora", "dora"): "use_dora=true, beside rank",
    ("lora", "prefix|prompt|p_tuning|vera"): "ia3, which trains a few vectors too",
    ("optimizer", "galore"): "adafactor or adamw-8bit, whose states are small too",
    ("optimizer", "shampoo|soap|sophia"): "adamw, with two states for each element; theirs may be "
    "more",
    ("optimizer", "paged"): "paged-adamw-8bit or paged-adamw-32bit",
    ("optimizer", "lion"): "lion-8bit, bitsandbytes' own",
    ("optimizer", "rmsprop|adagrad|muon|nesterov"): "sgd-momentum, with one state for each "
    "element too",
    ("optimizer", "adam.*8bit"): "adamw-8bit, bitsandbytes' own",
    ("optimizer", "backward|bwd"): "adamw-in-backward, which frees each gradient as soon",
    ("optimizer", "adam"): "adamw, with two states for each element",
    (
        "checkpointing",
        "offload|unsloth",
    ): "non-reentrant, which frees activations too, and computes them again",
    ("model", "lstm|gru|rnn"): "char-lstm or ptb-lstm-small, or a mapping of kind and sizes",
    ("checkpointing", "selective|partial|every"): "checkpointed_share, beside checkpointing "
    "non-reentrant: the share of blocks, 0.5 for every second",
    ("", "offload"): "checkpointing non-reentrant for activations, optimizer paged-adamw-32bit for "
    "states",
    ("", "fp8|float8"): "dtype bfloat16: float8 spares time, and keeps activations in 16 bits",
    ("", "group.*length|bucket"): "lengths, with the share of batches of each",
    ("", "energy|price|cost"): "dpprof budget, which tells the energy and the price of a training",
    ("", "pack"): "padding packed",
    ("", "4bit|8bit"): "quantization nf4 or int8",
}
"""The closest question by the key, empty for an unknown key, and by a pattern of what is asked."""


def find_closest(key: str, asked: Any) -> str:
    """Return the closest question to what is not allowed, to end its sentence; else nothing.

    Example:
        >>> find_closest("quantization", "gptq")
        '; closest: nf4, whose weights have 4 bits too, and a scale for 64'
    """
    if not isinstance(asked, str):
        return ""
    texts = [
        text
        for (name, pattern), text in _CLOSEST.items()
        if name in key.split(".") and re.search(pattern, asked.lower().replace("-", "_"))
    ]
    return f"; closest: {texts[0]}" if texts else ""


Read = TypeVar("Read", bound=BaseModel)

NAME_TAG, DIMENSIONS_TAG, TARGET_TAG = "<name>", "<dimensions>", "<target>"
ARCHITECTURE_TAG, RECURRENT_TAG = "<architecture>", "<recurrent>"
"""Tags for the ways to write a model or a target; pydantic puts them into error locations."""

_NOT_KEYS = (NAME_TAG, DIMENSIONS_TAG, TARGET_TAG, ARCHITECTURE_TAG, RECURRENT_TAG, "[key]")

MAX_SENTENCES = 10  # beyond this number of problems, a message only counts them
_MAX_LENGTH = 80  # the most letters of a key or a value in a message


class _Short(reprlib.Repr):
    """Spells any value in a few escaped letters."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _MAX_LENGTH

    def repr_int(self, x: int, level: int) -> str:
        """Return an integer as text; Python itself refuses integers of thousands of digits."""
        digits = int(x.bit_length() * math.log10(2)) + 1
        if digits <= self.maxlong:
            return super().repr_int(x, level)
        return f"a number of {digits:,} digits"


_repr = _Short()


class InputError(ValueError):
    """Something that the user wrote is not valid; the message says what is allowed."""


def refuse(key: str, value: Any, allowed: str) -> InputError:
    """Return the error that refuses a value, with the message that all refusals share.

    Control characters in the value are escaped, so that it cannot disturb a terminal.
    """
    return InputError(f"{key}: {_repr.repr(value)} is not allowed; {allowed}")


def one_of(names: Iterable[str], value: Any = None) -> str:
    """Return the list of allowed names, and a suggestion where a typo is likely."""
    ordered = sorted(names)
    text = f"allowed: {', '.join(ordered)}" if ordered else "nothing is allowed here"
    near: list[str] = []
    if isinstance(value, str):
        bare = {re.sub("^hf:|[^a-z0-9]", "", name): name for name in ordered}
        own = re.sub("[^a-z0-9]|^.*/|nvidia|geforce", "", value.lower())  # as others spell it
        near = [bare[own]] if own in bare else difflib.get_close_matches(value, ordered, n=1)
    return f"did you mean {near[0]!r}? {text}" if near else text


def _keys(location: Sequence[int | str]) -> list[str]:
    """Return the keys of a pydantic location, without list positions and union tags."""
    return [part for part in location if isinstance(part, str) and part not in _NOT_KEYS]


def _key(location: Sequence[int | str]) -> str:
    keys = (ascii(part)[1:-1] for part in _keys(location))
    return ".".join(
        key if len(key) <= _MAX_LENGTH else f"{key[: _MAX_LENGTH - 3]}..." for key in keys
    )


def _allowed_keys(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the keys that the mapping at a location may have."""
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
    """Return the model inside ``Model``, ``list[Model]``, ``dict[str, Model]`` or a union."""
    if _is_model(annotation):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        inner = _inner_model(argument)
        if inner is not None:
            return inner
    return None


def explain(
    error: ValidationError,
    model: type[BaseModel],
    *,
    options: bool = False,
    names: Mapping[str, Sequence[str]] | None = None,
) -> InputError:
    """Return one sentence per problem that pydantic found, and the number of problems beyond ten.

    ``model`` is what was validated, for its allowed keys; ``names`` are those that exist, by
    key. With ``options``, keys are spelled as ``spell`` spells them.
    """
    name_of = spell if options else str
    missing: dict[str, list[str]] = {}
    sentences: dict[str, None] = {}
    for problem in error.errors(include_url=False):
        location = problem["loc"]
        if problem["type"] == "missing":
            missing.setdefault(_key(location[:-1]), []).append(str(location[-1]))
        else:
            sentences[_sentence(problem, model, options, names or {})] = None
    for parent, absent in missing.items():
        if parent:
            sentences[f"{name_of(parent)}: missing {', '.join(absent)}"] = None
        else:
            sentences[f"missing: {', '.join(map(name_of, absent))}"] = None
    return InputError("\n".join(limit_lines(list(sentences))))


def read_model(path: Path, model: type[Read], what: str) -> Read:
    """Read a JSON file of a model; ``what`` says what it should be.

    Raises:
        InputError: The file is not valid.
        OSError: It cannot be read.
    """
    try:
        return model.model_validate(read_json(path))
    except ValueError as error:
        why = explain(error, model) if isinstance(error, ValidationError) else error
        raise InputError(f"{path}: is not {what} ({why})") from None


def limit_lines(lines: Sequence[str]) -> Sequence[str]:
    """Return the first problems, and the number of the others."""
    beyond = len(lines) - MAX_SENTENCES
    return [*lines[:MAX_SENTENCES], f"and {beyond:,} more"] if beyond > 0 else lines


def _sentence(
    problem: ErrorDetails, model: type[BaseModel], options: bool, names: Mapping[str, Sequence[str]]
) -> str:
    """Return a sentence on what is wrong with one key's value, or with a key itself."""
    location, value = problem["loc"], problem["input"]
    key = _key(location)
    if problem["type"] == "extra_forbidden":
        unknown, parent = str(location[-1]), _key(location[:-1])
        allowed = one_of(_allowed_keys(model, location[:-1]), unknown)
        where = f" in {parent}" if parent else ""
        closest = find_closest(f"{parent}.", unknown)
        return f"unknown key {_repr.repr(unknown)}{where}; {allowed}{closest}"
    message = problem["msg"].removeprefix("Value error, ")
    message = re.sub(r"^(Input|String|List|Dictionary) should", "it must", message)
    message = re.sub(r"^Keys should", "its keys must", message)
    message = re.sub(r"^Unable to parse .*", "it must be a number of fewer digits", message)
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", message)
    message = message.removesuffix(" after validation, not 0")
    named = names.get(_keys(location)[-1]) if _keys(location) else None
    if named and problem["type"] == "string_pattern_mismatch":
        message = one_of(named, value)
    if not key and problem["type"] == "value_error":
        return message  # keys contradict one another, and the message names them
    spelled = spell(key) if options else key
    return str(refuse(spelled or "the configuration", value, message + find_closest(key, value)))


_in_a_command: ContextVar[bool] = ContextVar("in_a_command", default=False)


@contextlib.contextmanager
def spelling_options() -> Iterator[None]:
    """Let ``spell`` spell keys as the options of a command, within this context."""
    token = _in_a_command.set(True)
    try:
        yield
    finally:
        _in_a_command.reset(token)


def spell(key: str) -> str:
    """Return a key as the user gave it: an option in a command, else a keyword of Python."""
    return option_name(key) if _in_a_command.get() else key


def option_name(key: str) -> str:
    """Return a key as a command-line option; only its first part becomes an option."""
    first, dot, rest = key.partition(".")
    return f"--{first.replace('_', '-')}{dot}{rest}"
