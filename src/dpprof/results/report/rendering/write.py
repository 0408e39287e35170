"""Writes content to files: JSON, Markdown, LaTeX, and a PDF by Typst."""

from pathlib import Path

import typst

from dpprof.results.report.rendering.document import Document
from dpprof.results.report.rendering.latex import render_latex
from dpprof.results.report.rendering.templates import escape_markdown, make_environment
from dpprof.system.files import write_atomically
from dpprof.system.paths import TEMPLATES


def render_markdown(document: Document) -> str:
    """Return the content as Markdown; figures are linked as PNG."""
    template = make_environment(escape_markdown).get_template("report.md.j2")
    return template.render(document=document)


def write_report(document: Document, folder: Path) -> None:
    """Write ``report.json``, ``report.md``, ``report.tex`` and ``report.pdf``.

    Figures are in ``figures/`` of the folder. Typst's template is fixed and reads the content as
    JSON, so Typst never parses any of its text as markup.
    """
    write_atomically(folder / "report.json", document.model_dump_json(indent=1) + "\n")
    write_atomically(folder / "report.md", render_markdown(document))
    write_atomically(folder / "report.tex", render_latex(document))
    pdf = typst.compile(  # type: ignore[type-var]  # its stub cannot infer font_paths
        (TEMPLATES / "report.typ").read_bytes(),
        root=str(folder.resolve()),
        sys_inputs={"content": "/report.json"},
    )
    write_atomically(folder / "report.pdf", pdf)
