"""Writes content to files: JSON, Markdown, LaTeX, and a PDF by Typst."""

import re
from pathlib import Path
from typing import Any

import typst
from markupsafe import Markup

from dpprof.results.report.rendering.document import Document, Table
from dpprof.results.report.rendering.templates import escape_markdown, make_environment
from dpprof.system.files import write_atomically
from dpprof.system.paths import TEMPLATES

_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "{}%&#$_"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    "\N{DAGGER}": r"\textdagger{}",
    "\N{DOUBLE DAGGER}": r"\textdaggerdbl{}",
    # After the end of a row LaTeX would read these as its arguments.
    **{character: f"{{{character}}}" for character in "[]*"},
}
_NOT_LATIN_1 = re.compile(r"[^ -~\xa1-\xff]")
_LIGATURE = re.compile(r"([-,])(?=\1)")
"""LaTeX would turn two of these into a dash or a quotation mark."""

_LONG = 30  # a column with texts of more letters is broken into lines
_LINE = {"scriptsize": 134, "tiny": 157}  # how many letters fit a line, by the font size of a table
_GAP = 1.6  # gap between two columns, in letters
_ROOM = 45  # if fewer letters are left for long columns, the table is set in the smaller size
_LEAST_ROOM = 28  # the fewest letters that long columns get in the smaller size


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


def render_markdown(document: Document) -> str:
    """Return the content as Markdown; figures are linked as PNG."""
    template = make_environment(escape_markdown).get_template("report.md.j2")
    return template.render(document=document)


def render_latex(document: Document) -> str:
    """Return the content as LaTeX; figures are included as PDF."""
    environment = make_environment(
        escape_latex,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
    template = environment.get_template("report.tex.j2")
    return template.render(document=document, lay_out=_lay_out)


def escape_latex(value: Any) -> str:
    """Return a text escaped for LaTeX; characters that its fonts lack become code points.

    What a template calls safe is LaTeX already.
    """
    if isinstance(value, Markup):
        return value
    text = "".join(_SPECIAL.get(character, character) for character in str(value))
    text = _NOT_LATIN_1.sub(lambda match: f"U+{ord(match[0]):04X}", text)
    return _LIGATURE.sub(r"\1{}", text)


def _cell(text: str) -> str:
    """Return a cell's escaped text, which may break within long names and paths."""
    return re.sub(r"(\\_|[-/.])", r"\1\\allowbreak{}", escape_latex(text))


def _lay_out(table: Table) -> dict[str, Any]:
    """Return the font size of a table that fits the page, its column types, header and rows.

    Long texts share the rest of the line, the other columns are as wide as their texts. By hand,
    because ``tabularx`` stretches no column of a table that breaks over pages. A heading longer
    than its column's cells is stacked word by word.
    """
    longest = [
        min(120, max(map(len, [*heading.split(), *(row[column] for row in table.rows)])))
        for column, heading in enumerate(table.header)
    ]
    taken = sum(_GAP + (length if length <= _LONG else 0) for length in longest)
    shared = sum(length for length in longest if length > _LONG)
    size = "scriptsize" if taken + (_ROOM if shared else 0) <= _LINE["scriptsize"] else "tiny"
    line = _LINE[size]
    room = min(max(line - taken, _LEAST_ROOM), shared)
    kinds, headings = [], []
    for text, length, numeric in zip(table.header, longest, table.numeric, strict=True):
        side = "r" if numeric else "l"
        if length > _LONG:
            width = room * length / shared / line
            kinds.append(rf">{{\raggedright\arraybackslash}}p{{{width:.3f}\linewidth}}")
        else:
            kinds.append(side)
        stacked = r"\\".join(map(_cell, text.split()))
        fits = len(text) <= length
        headings.append(_cell(text) if fits else rf"\shortstack[{side}]{{{stacked}}}")
    return {
        "size": size,
        "columns": "".join(kinds),
        "header": " & ".join(headings),
        "rows": [" & ".join(map(_cell, row)) for row in table.rows],
    }
