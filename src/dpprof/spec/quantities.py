"""The kinds of numbers in a config, with their allowed ranges."""

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
    """Refuse YAML's ``true`` and ``false``, which Python would accept as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("it must be a number, not true or false")  # noqa: TRY004 (pydantic's way)
    return value


_SIZE = r"\s*([0-9]+(\.0+)?\s*[A-Za-z]*|[0-9]*\.[0-9]+\s*(?![Bb]\s*$)[A-Za-z]+)\s*"
"""A whole size as text. pydantic alone would read only the beginning of a text, 4 bytes of
``4,000MiB``, and would cut fractions of a byte."""

_MAX_SIZE = 2**63 - 1
"""The largest resource limit or tensor size."""


def _read_size(value: Any, parse: ValidatorFunctionWrapHandler) -> ByteSize:
    """Return the bytes of a number, or of a whole text with a number and a unit."""
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


# The bound comes before the validator, because only then pydantic puts it into the JSON schema.
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
