"""JSON files that are written as a whole, with a digest that reveals cuts and edits.

Each file has the version of its schema and, as ``content_digest``, a digest of everything else.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dpprof.experiments.config.validation import explain, limit_lines
from dpprof.system.files import canonical_json, read_json, sha256_hex, write_atomically
from dpprof.system.messages import escape_all


class Part(BaseModel):
    """A part of such a file: no value is guessed, unknown values are null."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )


_DIGEST = "content_digest"
Natural = Annotated[int, Field(ge=0)]
"""A number of bytes, or of other things."""


class _Device(BaseModel, extra="allow"):
    """What readers rely on of a device's description."""

    type: str | None = None
    name: str | None = None
    cores: int | None = None
    threads: int | None = None


class _Host(BaseModel, extra="allow"):
    hostname: str | None = None
    cores_logical: int | None = None


class _Provenance(BaseModel, extra="allow"):
    """What readers rely on of a provenance."""

    python: str | None = None
    packages: dict[str, str | None] = {}
    settings: dict[str, str | None] = {}
    host: _Host = _Host()
    git: dict[str, Any] = {}


def _fit(kind: type[BaseModel], value: dict[str, Any]) -> dict[str, Any]:
    """Check that a mapping fits a model; it stays a mapping, with all that it says."""
    kind.model_validate(value)
    return value


Device = Annotated[dict[str, Any], AfterValidator(partial(_fit, _Device))]
Provenance = Annotated[dict[str, Any], AfterValidator(partial(_fit, _Provenance))]

Record = TypeVar("Record", bound=Part)


class ResultError(Exception):
    """A file that cannot be trusted; the message names it and says what to do."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}; delete it and run snakemake to make it again")
        self.problem = problem


class ManyResultsError(ResultError):
    """Several such files."""

    def __init__(self, errors: Sequence[ResultError]) -> None:
        Exception.__init__(self, "\n".join(limit_lines([str(error) for error in errors])))
        self.problem = f"{len(errors):,} files cannot be trusted"


def _canonical(document: dict[str, Any]) -> str:
    """Return the canonical JSON of everything but the content digest."""
    return canonical_json({key: value for key, value in document.items() if key != _DIGEST})


def write_record(path: Path, kind: type[Record], fields: Mapping[str, Any]) -> Record:
    """Write a record with its content digest, as a whole.

    Text that cannot be encoded is escaped, here and when a file is read, so that later uses of it
    do not fail.

    The fields that ``kind`` declares itself come first; ``content_digest`` is added.
    """
    draft = kind.model_validate({**fields, _DIGEST: ""})
    dumped = escape_all(draft.model_dump(mode="json"))
    # Identity first, measurements after: the order in which a person reads.
    document = {key: value for key, value in dumped.items() if key in kind.__annotations__}
    document |= dumped
    document[_DIGEST] = sha256_hex(_canonical(document))
    write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return kind.model_validate(document)


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read and check a record.

    Raises:
        ResultError: The file is cut, edited, or of another schema version.
        FileNotFoundError: There is no such file.
    """
    try:
        document = read_json(path)
    except ValueError as error:
        raise ResultError(path, f"is not complete JSON: it was cut or damaged ({error})") from None
    if not isinstance(document, dict) or "schema_version" not in document:
        raise ResultError(path, "is not a result file: it has no schema_version")
    stated, version = document["schema_version"], kind.model_fields["schema_version"].default
    if stated != version:
        raise ResultError(path, f"has schema version {stated!r}, and this dpprof reads {version}")
    try:
        canonical = _canonical(document)
    except (ValueError, RecursionError):  # NaN, infinity, or depth, which dpprof never writes
        canonical = None
    if canonical is None or document.get(_DIGEST) != sha256_hex(canonical):
        raise ResultError(path, "was edited after it was written: its content digest differs")
    try:
        # Nearly every file has no surrogate, and looking into each of its texts takes time.
        return kind.model_validate(escape_all(document) if "\\ud" in canonical else document)
    except ValidationError as error:
        raise ResultError(path, f"does not fit the schema ({explain(error, kind)})") from None
