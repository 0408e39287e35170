"""The kinds of numbers in a config, with their allowed ranges."""

import re
from decimal import Decimal
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
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


def refuse_bool(value: Any) -> Any:
    """Refuse YAML's ``true`` and ``false``, which Python would accept as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("it must be a number, not true or false")  # noqa: TRY004 (pydantic's way)
    return value


def read_pairs(value: Any, example: str) -> Any:
    """Return the mapping that a text such as the example spells; any other value as it is."""
    if not isinstance(value, str):
        return value
    pairs: dict[str, Any] = {}
    for part in value.split(","):
        key, equals, text = part.partition("=")
        if not equals:
            raise ValueError(f"it must be a mapping, or pairs such as {example}")
        pairs[key.strip()] = text.strip()
    return pairs


def optional(description: str, **settings: Any) -> Any:
    """Describe a field that may be left out, or not be known: it is null then."""
    return Field(None, description=description, **settings)


class _OneOrMany:
    """Schema of a key whose value may be a scalar or a list."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        many = handler(schema)
        return {"anyOf": [many["items"], many]}


def one_or_many(item: Any) -> Any:
    """Return the type of a key that takes one value or a list of at least one."""
    listed = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value])
    return Annotated[list[item], Field(min_length=1), listed, _OneOrMany()]


_SIZE = r"\s*([0-9]+(\.0+)?\s*[A-Za-z]*|[0-9]*\.[0-9]+\s*(?![Bb]\s*$)[A-Za-z]+)\s*"
"""A whole size as text. pydantic alone would read only the beginning of a text, 4 bytes of
``4,000MiB``, and would cut fractions of a byte."""

_MAX_SIZE = 2**63 - 1  # the largest resource limit or tensor size


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


_WHOLE = r"\s*[0-9]+(\.[0-9]+)?([eE]\+?[0-9]{1,2})?\s*"
_MAX_WHOLE = 10**15


def _read_whole(value: Any) -> int:
    """Return a large number of things, which people write as 2e9 and YAML reads as a text."""
    if isinstance(value, str) and re.fullmatch(_WHOLE, value):
        value = Decimal(value.strip())
    is_number = isinstance(refuse_bool(value), int | float | Decimal)
    if not is_number or not 1 <= value <= _MAX_WHOLE or value % 1 != 0:
        raise ValueError("it must be a whole number from 1 to 1e15, such as 1000000 or 1e6")
    return int(value)


# The bound comes before the validator, because only then pydantic puts it into the JSON schema.
Count = Annotated[int, Field(ge=1, le=10**9), BeforeValidator(refuse_bool)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(refuse_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(refuse_bool)]
Fraction = Annotated[float, Field(ge=0, lt=1), BeforeValidator(refuse_bool)]
PositiveShare = Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_bool)]
Seed = Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(refuse_bool)]
Replicates = Annotated[int, Field(ge=1, le=1000), BeforeValidator(refuse_bool)]
_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": f"^{_SIZE}$"},
        {"type": "integer", "minimum": 1, "maximum": _MAX_SIZE},
    ]
}
Size = Annotated[ByteSize, WrapValidator(_read_size), WithJsonSchema(_SIZE_SCHEMA)]
Whole = Annotated[
    int,
    BeforeValidator(_read_whole),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": _MAX_WHOLE},
                {"type": "string", "pattern": f"^{_WHOLE}$"},
            ]
        }
    ),
]
"""A number too large to be written with all its digits: ``2e9``."""
