"""Writes content to files: Markdown, LaTeX, and a PDF by LaTeX or Typst."""

from pathlib import Path

import jinja2
import typst

from dpprof.report.rendering.document import Document
from dpprof.report.rendering.latex import LatexError, compile_latex, has_latex, render_latex
from dpprof.report.rendering.markdown import escape_markdown
from dpprof.system.console import say
from dpprof.system.files import write_atomically
from dpprof.system.paths import TEMPLATES

ROUTES = ("latex", "typst")


def render_markdown(document: Document) -> str:
    """Return the content as Markdown; figures are linked as PNG."""
    environment = jinja2.Environment(  # noqa: S701 (finalize escapes, for Markdown)
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=escape_markdown,
    )
    return environment.get_template("report.md.j2").render(document=document)


def render_pdf(content: Path, output: Path) -> None:
    """Write the PDF of a content file with Typst.

    The template is fixed and reads the content as JSON, so Typst never parses any of its text as
    markup.

    Figures are looked up in ``figures/`` beside ``content``, which is ``report.json``.
    """
    document = typst.compile(  # type: ignore[type-var]  # its stub cannot infer font_paths
        (TEMPLATES / "report.typ").read_bytes(),
        root=str(content.parent.resolve()),
        sys_inputs={"content": f"/{content.name}"},
    )
    write_atomically(output, document)


def write_report(document: Document, folder: Path, pdf: str = "auto") -> None:
    """Write ``report.json``, ``report.md``, ``report.tex`` and ``report.pdf``.

    Figures are in ``figures/`` of the folder. ``pdf`` is the program that makes the PDF, one of
    ``ROUTES``; ``auto`` is latex where it is installed and works, else typst. Both lay out the
    same content.

    Raises:
        LatexError: ``pdf`` is ``latex``, and LaTeX made no PDF.
    """
    content, source, output = (folder / f"report.{kind}" for kind in ("json", "tex", "pdf"))
    write_atomically(content, document.model_dump_json(indent=1) + "\n")
    write_atomically(folder / "report.md", render_markdown(document))
    write_atomically(source, render_latex(document))
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
