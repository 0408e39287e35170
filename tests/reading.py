"""Looks up what a report says."""

from dpprof.results.report.rendering.document import Bullets, Document, Section


def titles_of(document: Document) -> list[str]:
    return [section.title for section in (*document.sections, *document.appendix)]


def section_of(document: Document, title: str) -> Section:
    every = (*document.sections, *document.appendix)
    return next(section for section in every if section.title == title)


def table_of(document: Document, title: str, index: int = 0) -> tuple[dict[str, str], ...]:
    tables = [block for block in section_of(document, title).blocks if block.kind == "table"]
    table = tables[index]
    return tuple(dict(zip(table.header, row, strict=True)) for row in table.rows)


def sentences_of(document: Document, title: str) -> str:
    """Return the bullets of a section."""
    blocks = section_of(document, title).blocks
    return " ".join(" ".join(block.items) for block in blocks if isinstance(block, Bullets))


def trust_of(document: Document) -> str:
    """Return what the first page says of how far to believe it."""
    return sentences_of(document, "Can I believe this?")
