"""Renders content as LaTeX."""

import re
from collections.abc import Iterable
from typing import Any

from dpprof.results.report.rendering.document import Document, Table
from dpprof.results.report.rendering.templates import make_environment

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

_LONG = 30
"""A column with texts of more letters is broken into lines."""

_LINE = {"scriptsize": 134, "tiny": 157}
"""How many letters fit a line, by the font size of a table."""

_GAP = 1.6
"""Gap between two columns, in letters."""

_ROOM = 45
"""If fewer letters are left for long columns, the table is set in the smaller size."""

_LEAST_ROOM = 28
"""The fewest letters that long columns get in the smaller size."""


class _Markup(str):
    """Text that is already LaTeX."""

    __slots__ = ()


def escape_latex(value: Any) -> str:
    """Return a text escaped for LaTeX; characters that its fonts lack become code points."""
    if isinstance(value, _Markup):
        return value
    text = "".join(_SPECIAL.get(character, character) for character in str(value))
    text = _NOT_LATIN_1.sub(lambda match: f"U+{ord(match[0]):04X}", text)
    return _LIGATURE.sub(r"\1{}", text)


def _cell(text: str) -> str:
    """Return a cell's escaped text, which may break within long names and paths."""
    return re.sub(r"(\\_|[-/.])", r"\1\\allowbreak{}", escape_latex(text))


def _row(cells: Iterable[str]) -> _Markup:
    return _Markup(" & ".join(map(_cell, cells)))


def _header(table: Table) -> _Markup:
    """Return a table's header; a heading longer than its column's cells is stacked word by word."""
    cells = []
    for text, longest, numeric in zip(table.header, _longest(table), table.numeric, strict=True):
        stacked = r"\\".join(map(_cell, text.split()))
        side = "r" if numeric else "l"
        fits = len(text) <= longest
        cells.append(_cell(text) if fits else rf"\shortstack[{side}]{{{stacked}}}")
    return _Markup(" & ".join(cells))


def _longest(table: Table) -> list[int]:
    """Return the most letters of a cell or of a word of the heading, for each column."""
    return [
        min(120, max(map(len, [*heading.split(), *(row[column] for row in table.rows)])))
        for column, heading in enumerate(table.header)
    ]


def _path(picture: str) -> _Markup:
    """Return the path of a figure's file; such names hold nothing that LaTeX could interpret."""
    return _Markup(f"figures/{picture}.pdf")


def _size(table: Table) -> _Markup:
    """Return the font size of a table that fits the page."""
    longest = _longest(table)
    needed = _ROOM if max(longest) > _LONG else 0
    taken = sum(_GAP + (length if length <= _LONG else 0) for length in longest)
    return _Markup("scriptsize" if taken + needed <= _LINE["scriptsize"] else "tiny")


def _columns(table: Table) -> _Markup:
    """Return the column types: long texts share the rest of the line, the others are as wide.

    By hand, because ``tabularx`` stretches no column of a table that breaks over pages.
    """
    longest, line = _longest(table), _LINE[_size(table)]
    shared = sum(length for length in longest if length > _LONG)
    left = line - sum(_GAP + (length if length <= _LONG else 0) for length in longest)
    room = min(max(left, _LEAST_ROOM), shared)
    kinds = []
    for length, numeric in zip(longest, table.numeric, strict=True):
        if length > _LONG:
            width = room * length / shared / line
            kinds.append(rf">{{\raggedright\arraybackslash}}p{{{width:.3f}\linewidth}}")
        else:
            kinds.append("r" if numeric else "l")
    return _Markup("".join(kinds))


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
    helpers = {"columns": _columns, "header": _header, "row": _row, "size": _size, "path": _path}
    return template.render(document=document, **helpers)
