"""Writes content to files: Markdown, plain text, LaTeX, and a PDF by LaTeX or Typst."""

import re
import textwrap
from pathlib import Path
from typing import Any

import jinja2
import typst

from dpprof.report.document import Document, Table
from dpprof.report.latex import LatexError, compile_latex, has_latex, render_latex
from dpprof.system.console import say
from dpprof.system.files import write_atomically
from dpprof.system.paths import TEMPLATES

ROUTES = ("latex", "typst")

CELL_WIDTH = 64
"""The most characters of a table cell in a terminal."""

SUMMARY_WIDTH = 100
"""The line width of running text in a terminal."""


def escape_markdown(value: Any) -> str:
    """Return a text escaped for Markdown: no markup, no HTML, no mathematics."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|#$~!])", r"\\\1", text)


def _environment(**options: Any) -> jinja2.Environment:
    """Return a Jinja environment in which every printed value goes through ``finalize``."""
    return jinja2.Environment(  # noqa: S701 (finalize escapes, for Markdown)
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )


def render_markdown(document: Document) -> str:
    """Return the content as Markdown; figures are linked as PNG."""
    template = _environment(finalize=escape_markdown).get_template("report.md.j2")
    return template.render(document=document)


def render_summary(document: Document) -> str:
    """Return the summary for a terminal: the main results and their tables."""
    environment = _environment()
    environment.filters["aligned"] = align
    environment.filters["wrapped"] = wrap
    return environment.get_template("summary.txt.j2").render(document=document)


def align(table: Table) -> list[str]:
    """Return a table as aligned lines; long texts are cut here, but not in the report.

    By hand: pandas aligns all columns alike, and tabulate is a dependency of Snakemake alone.
    """
    cells = [tuple(_cut(text) for text in row) for row in (table.header, *table.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.header))]

    def line(row: tuple[str, ...]) -> str:
        padded = [
            text.rjust(width) if numeric else text.ljust(width)
            for text, width, numeric in zip(row, widths, table.numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return [line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])]


def wrap(text: str, mark: str = "") -> str:
    """Return a text as lines; the first begins with the mark, the others are indented alike."""
    return textwrap.fill(
        text,
        SUMMARY_WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cut(text: str) -> str:
    return text if len(text) <= CELL_WIDTH else f"{text[: CELL_WIDTH - 3]}..."


def render_pdf(content: Path, output: Path) -> None:
    """Write the PDF of a content file with Typst.

    The template is fixed and reads the content as JSON, so Typst never parses any of its text as
    markup.

    Args:
        content: ``report.json``; figures are looked up in ``figures/`` beside it.
        output: The PDF to write.
    """
    document = typst.compile(  # type: ignore[type-var]  # its stub cannot infer font_paths
        (TEMPLATES / "report.typ").read_bytes(),
        root=str(content.parent.resolve()),
        sys_inputs={"content": f"/{content.name}"},
    )
    write_atomically(output, document)


def write_report(document: Document, folder: Path, pdf: str = "auto") -> None:
    """Write ``report.json``, ``report.md``, ``report.tex``, ``report.pdf`` and ``summary.txt``.

    Args:
        document: What to write.
        folder: The folder to write to; its ``figures/`` holds the figures.
        pdf: The program that makes the PDF, one of ``ROUTES``; ``auto`` is latex where it is
            installed and works, else typst. Both lay out the same content.

    Raises:
        LatexError: ``pdf`` is ``latex``, and LaTeX made no PDF.
    """
    content, source, output = (folder / f"report.{kind}" for kind in ("json", "tex", "pdf"))
    write_atomically(content, document.model_dump_json(indent=1) + "\n")
    write_atomically(folder / "report.md", render_markdown(document))
    write_atomically(source, render_latex(document))
    write_atomically(folder / "summary.txt", render_summary(document))
    if pdf == "latex" or (pdf == "auto" and has_latex()):
        try:
            compile_latex(source, output)
        except LatexError as error:
            if pdf == "latex":
                raise
            say(f"LaTeX made no PDF ({error}); using typst instead")
        else:
            return
    render_pdf(content, output)
