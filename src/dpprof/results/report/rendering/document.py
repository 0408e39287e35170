"""The structure of a report's content: sections of blocks, with every text a plain string.

Templates lay this out and add no content. No string is markup: each template escapes or quotes
what it prints, so a name or a message cannot inject markup.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator

from dpprof.experiments.config.naming import Name
from dpprof.experiments.records.record import Part


def _printable(text: str) -> str:
    """Return a text on one line, with visible control characters."""
    flat = " ".join(text.split())
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in flat)


Text = Annotated[str, AfterValidator(_printable)]


class Paragraph(Part):
    """Running text."""

    kind: Literal["paragraph"] = "paragraph"
    text: Text


class Bullets(Part):
    """A list of short statements."""

    kind: Literal["bullets"] = "bullets"
    items: tuple[Text, ...]


class Table(Part):
    """A table of texts; numbers are already formatted."""

    kind: Literal["table"] = "table"
    caption: Text
    header: tuple[Text, ...]
    rows: tuple[tuple[Text, ...], ...]
    numeric: tuple[bool, ...]  # which columns are set flush right


class Picture(Part):
    """A figure, by the stem of its files."""

    kind: Literal["picture"] = "picture"
    name: Name
    said: Text = ""  # the sentence that stands above it
    caption: Text


AnyBlock = Paragraph | Bullets | Table | Picture
Blocks = list[AnyBlock]


class Drawing(Part):
    """A figure's sentence and caption, or why nothing was drawn."""

    name: Name
    said: Text = ""
    caption: Text
    missing: Text | None  # why nothing was drawn; the figure then shows only this reason

    @property
    def picture(self) -> Picture:
        """The figure as a block."""
        return Picture(name=self.name, said=self.said, caption=self.caption)


class Section(Part):
    """A title and its blocks."""

    title: Text
    blocks: tuple[AnyBlock, ...]


class Document(Part):
    """A whole report."""

    title: Text
    question: Text = ""  # what the sweep asks, in one line
    headline: tuple[Text, ...]  # the answer, in a few sentences
    sections: tuple[Section, ...]
    """The first one has the numbers behind the answer, the second says how far to trust them."""

    appendix: tuple[Section, ...] = ()  # every table, and how things were measured
