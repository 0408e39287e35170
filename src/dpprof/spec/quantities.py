"""Kinds of numbers that a config may give, and what is allowed of them."""

import re
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)


def refuse_bool(value: Any) -> Any:
    """YAML's ``true`` is no number, although Python would count it as 1."""
    if isinstance(value, bool):
        raise ValueError("it must be a number, not true or false")  # noqa: TRY004 (pydantic's way)
    return value


_SIZE = r"\s*([0-9]+(\.0+)?\s*[A-Za-z]*|[0-9]*\.[0-9]+\s*(?![Bb]\s*$)[A-Za-z]+)\s*"
"""A whole size as text. pydantic reads the beginning of a text alone, 4 bytes of
``4,000MiB``, and cuts what is no whole byte."""

_MAX_SIZE = 2**63 - 1
"""The most that a resource limit or a tensor's size can be."""


def _read_size(value: Any, parse: ValidatorFunctionWrapHandler) -> ByteSize:
    """Read a number of bytes, or a number with a unit, as a whole."""
    size = ByteSize(0)
    cut = isinstance(value, float) and not value.is_integer()
    if not cut and not (isinstance(value, str) and not re.fullmatch(_SIZE, value)):
        try:
            size = parse(refuse_bool(value))
        except (ValidationError, ValueError, OverflowError):
            size = ByteSize(0)
    if not 0 < size <= _MAX_SIZE:
        raise ValueError(
            "it must be a number of bytes above 0 and below 8EiB, or one with a unit, such as 4GiB"
        )
    return size


# The bound stands before the validator: pydantic publishes it in the JSON schema only so.
Count = Annotated[int, Field(ge=1, le=10**9), BeforeValidator(refuse_bool)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(refuse_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(refuse_bool)]
Seed = Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(refuse_bool)]
Replicates = Annotated[int, Field(ge=1, le=1000), BeforeValidator(refuse_bool)]
_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": f"^{_SIZE}$"},
        {"type": "integer", "minimum": 1, "maximum": _MAX_SIZE},
    ]
}
Size = Annotated[ByteSize, WrapValidator(_read_size), WithJsonSchema(_SIZE_SCHEMA)]
