"""Kinds of numbers that a config may give, and what is allowed of them."""

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


def _read_size(value: Any, parse: ValidatorFunctionWrapHandler) -> ByteSize:
    """Read a number of bytes, or a number with a unit."""
    try:
        size: ByteSize = parse(refuse_bool(value))
    except (ValidationError, ValueError):
        size = ByteSize(0)
    if size <= 0:
        raise ValueError("it must be a number of bytes above 0, or one with a unit, such as 4GiB")
    return size


# The bound stands before the validator: pydantic publishes it in the JSON schema only so.
Count = Annotated[int, Field(ge=1, le=10**9), BeforeValidator(refuse_bool)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(refuse_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(refuse_bool)]
Seed = Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(refuse_bool)]
Replicates = Annotated[int, Field(ge=1, le=1000), BeforeValidator(refuse_bool)]
_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": r"^\s*\d*\.?\d+\s*[A-Za-z]*\s*$"},
        {"type": "integer", "minimum": 1},
    ]
}
Size = Annotated[ByteSize, WrapValidator(_read_size), WithJsonSchema(_SIZE_SCHEMA)]
