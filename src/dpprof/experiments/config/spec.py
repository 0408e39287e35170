"""A description that a digest of its content names."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel

from dpprof.system.files import canonical_json, sha256_hex


class Spec(BaseModel, frozen=True, extra="forbid"):
    """A description with one spelling, so that a digest of its content can name it."""

    @cached_property
    def canonical(self) -> str:
        """The content of its file: its fields as canonical JSON."""
        return canonical_json(self.model_dump(mode="json"))

    @cached_property
    def digest(self) -> str:
        """The sha256 of the canonical JSON, 64 hex digits."""
        return sha256_hex(self.canonical)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other fields, which does not keep what followed from these."""
        copied = super().model_copy(update=update, deep=deep)
        for name in vars(copied).keys() - type(copied).model_fields.keys():
            del vars(copied)[name]
        return copied
