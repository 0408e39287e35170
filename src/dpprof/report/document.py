"""The shape of a report's content: sections of blocks, every text a plain string.

Templates lay this out and add nothing. No string in it is markup: each template escapes
or quotes what it prints, so a name or a message can inject nothing.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from dpprof.spec.experiment import Name
from dpprof.spec.validation import InputError, explain
from dpprof.system.files import read_json


def _printable(text: str) -> str:
    """Put a text on one line and make control characters visible."""
    flat = " ".join(text.split())
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in flat)


Text = Annotated[str, AfterValidator(_printable)]


class Block(BaseModel):
    """A piece of a section."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Paragraph(Block):
    """Running text."""

    kind: Literal["paragraph"] = "paragraph"
    text: Text


class Bullets(Block):
    """A list of short statements."""

    kind: Literal["bullets"] = "bullets"
    items: tuple[Text, ...]


class Table(Block):
    """A table of texts; numbers are formatted already."""

    kind: Literal["table"] = "table"
    caption: Text
    header: tuple[Text, ...]
    rows: tuple[tuple[Text, ...], ...]
    numeric: tuple[bool, ...]
    """Which columns are set flush right."""


class Picture(Block):
    """A figure, by the stem of its files."""

    kind: Literal["picture"] = "picture"
    name: Name
    caption: Text


class Drawing(BaseModel):
    """What is known of a figure beside its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    caption: Text
    missing: Text | None
    """Why nothing could be drawn; the picture then says only that."""


class Section(BaseModel):
    """A titled run of blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: Text
    blocks: tuple[Paragraph | Bullets | Table | Picture, ...]
    in_summary: bool = False
    """Whether the few lines for the terminal have it too."""


class Document(BaseModel):
    """A whole report."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: Text
    headline: tuple[Text, ...]
    """What there is to know, in a few sentences."""

    sections: tuple[Section, ...]


def read_drawing(path: Path) -> Drawing:
    """Read what is known of a figure.

    Raises:
        InputError: The file tells nothing of one; names it.
    """
    try:
        return Drawing.model_validate(read_json(path))
    except ValueError as error:
        why = explain(error, Drawing) if isinstance(error, ValidationError) else error
        raise InputError(f"{path}: tells of no figure ({why})") from None
