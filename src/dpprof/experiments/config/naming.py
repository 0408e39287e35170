"""How a config names a model, a method or a target, and describes a model by its sizes."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from dpprof.experiments.config import validation
from dpprof.experiments.config.architecture import PREFIX, Architecture
from dpprof.experiments.config.quantities import Count, optional, refuse_bool
from dpprof.experiments.config.target import Target

NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,39}$"
"""Allowed names of models, methods and instruments: safe in a path, a shell and a report."""

CODE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.]{0,99}:[A-Za-z_][A-Za-z0-9_]{0,99}$"
"""A function that builds a model, as ``package.module:function``; no file names one."""


class Dimensions(BaseModel, frozen=True, extra="forbid"):
    """The size of a decoder-only transformer; its MLP is four times ``d_model`` wide."""

    vocab_size: Annotated[int, Field(ge=2, le=10**9), BeforeValidator(refuse_bool)] = Field(
        description="tokens in the vocabulary"
    )
    d_model: Count = Field(description="width of the residual stream")
    layers: Count = Field(description="transformer blocks")
    heads: Count = Field(description="attention heads; must divide d_model")

    @model_validator(mode="after")
    def _refuse_uneven_heads(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(
                f"heads must divide d_model, and {self.heads} does not divide {self.d_model}"
            )
        return self


class RecurrentSizes(BaseModel, frozen=True, extra="forbid"):
    """The size of a recurrent network: a table, recurrent layers, a linear head."""

    kind: Literal["LSTM", "GRU", "RNN"] = Field(description="its layers")
    vocab_size: Count = Field(description="tokens in the vocabulary")
    embedding: Count = Field(description="width of an embedding")
    hidden: Count = Field(description="width of a state")
    layers: Count = Field(1, description="recurrent layers")
    classes: Count | None = optional("what a classifier tells apart; null: a language model")

    def reduce(self) -> Self:
        """Return small sizes with the same layers, for verification."""
        classes = None if self.classes is None else 5
        small = {"vocab_size": 50, "embedding": 8, "hidden": 8, "classes": classes}
        return self.model_copy(update=small)


def _tell_apart(mapping: type[BaseModel], tag: str, value: Any) -> str | None:
    """Tag a value as a name or a mapping; tags are not part of a key."""
    if isinstance(value, str):
        return validation.NAME_TAG
    return tag if isinstance(value, dict | mapping) else None


def _kind_of_model(value: Any) -> str | None:
    if isinstance(value, Architecture) or (isinstance(value, dict) and "hf" in value):
        return validation.ARCHITECTURE_TAG
    if isinstance(value, RecurrentSizes) or (isinstance(value, dict) and "hidden" in value):
        return validation.RECURRENT_TAG
    return _tell_apart(Dimensions, validation.DIMENSIONS_TAG, value)


class _Overrides(BaseModel, extra="allow"):
    """A Hugging Face model by name, and the keys of its config that differ."""

    hf: str


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
ModelInput = (
    Name | Annotated[str, Field(pattern=f"^{PREFIX}.")] | Dimensions | RecurrentSizes | _Overrides
)
"""How a model may be written."""

_NameOrCode = Annotated[str, Field(pattern=f"{NAME_PATTERN}|{CODE_PATTERN}")]
Model = Annotated[
    Annotated[_NameOrCode, Tag(validation.NAME_TAG)]
    | Annotated[Dimensions, Tag(validation.DIMENSIONS_TAG)]
    | Annotated[RecurrentSizes, Tag(validation.RECURRENT_TAG)]
    | Annotated[Architecture, Tag(validation.ARCHITECTURE_TAG)],
    Discriminator(
        _kind_of_model,
        custom_error_type="model_kind",
        custom_error_message=f"it must be a model's name, {PREFIX}NAME, or a mapping of dimensions",
    ),
]
For = Annotated[
    Annotated[Name, Tag(validation.NAME_TAG)] | Annotated[Target, Tag(validation.TARGET_TAG)],
    Discriminator(
        lambda value: _tell_apart(Target, validation.TARGET_TAG, value),
        custom_error_type="target_kind",
        custom_error_message="it must be a target's name, or a mapping of memory_bytes, "
        "flops_per_s and bandwidth_bytes_per_s",
    ),
]


def is_code(model: Any) -> bool:
    """Return whether a model is a function of the user's own, as ``package.module:function``."""
    return isinstance(model, str) and ":" in model


def refuse_code(model: Any, key: str) -> None:
    """Refuse the user's own code as a model where a file names it.

    Raises:
        InputError: It is such code; the message names the key.
    """
    if is_code(model):
        raise validation.refuse(
            key,
            model,
            "a file runs no code; give it on the command line or from Python, or declare an entry "
            "point (docs/how-to/profile-my-model.md)",
        )
