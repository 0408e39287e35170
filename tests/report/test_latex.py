"""Nothing in a text is LaTeX, and ``report.tex`` compiles where TeX is installed."""

import re
import shutil
import string
import subprocess
from pathlib import Path

import pytest
from pypdf import PdfReader

from dpprof.results.report.rendering.document import (
    Bullets,
    Document,
    Paragraph,
    Picture,
    Section,
    Table,
)
from dpprof.results.report.rendering.write import escape_latex, render_latex

EVIL = (
    r"a_b%c&d#e$f{g}~h^i\j<k>l|m`n'o" + '"p [q] *r --s \\input{/etc/passwd} \\\\ ^^41 é ü 中 \x1b'
)
CHARACTERS = sorted(set(string.printable) - set(string.whitespace))


def document_of(*texts: str, more: tuple = ()) -> Document:
    cells = tuple((text, "1.0") for text in texts)
    blocks = (
        *(Paragraph(text=text) for text in texts),
        Bullets(items=texts),
        Table(caption=texts[0], header=("what", "n"), rows=cells[:8], numeric=(False, True)),
        Table(caption="long", header=("what", "n"), rows=cells * 9, numeric=(False, True)),
        *more,
    )
    return Document(
        title=texts[0], headline=texts, sections=(Section(title=texts[0], blocks=blocks),)
    )


def make_wide_table(rows: int, text: str) -> Table:
    header = ("method", "what was said", *["per sample gradients"] * 8)
    cells = ("opacus-fast-gradient-clipping", text, *["12,345.6"] * 8)
    numeric = tuple(number > 1 for number in range(len(header)))
    return Table(caption="wide", header=header, rows=(cells,) * rows, numeric=numeric)


def test_specials_are_escaped_and_the_rest_is_itself() -> None:
    assert escape_latex("50% of $x_1$ & {y} #1 ~ ^ \\z") == (
        r"50\% of \$x\_1\$ \& \{y\} \#1 \textasciitilde{} \textasciicircum{} \textbackslash{}z"
    )
    plain = string.ascii_letters + string.digits + " .,:;!?()+=/@"
    assert escape_latex(plain) == plain
    assert escape_latex("é 中") == "é U+4E2D"


def test_tables_use_booktabs_and_figures_are_included_as_pdf() -> None:
    picture = Picture(name="seq-len", caption="x")
    source = render_latex(document_of(*"abcdefghi", more=(picture,)))

    for command in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{tabular}{lr}"):
        assert command in source
    assert r"\begin{longtable}{lr}" in source
    assert r"\fitpicture{figures/seq-len.pdf}" in source


@pytest.mark.skipif(shutil.which("latexmk") is None, reason="no latexmk here")
def test_hostile_text_is_shown_and_does_nothing_and_wide_tables_fit(tmp_path: Path) -> None:
    long = "a long text of many words " * 5
    wide = tuple(make_wide_table(rows, text) for rows in (3, 30) for text in ("short", long))
    texts = [f"x{character}{character}y" for character in CHARACTERS]
    source = render_latex(document_of(EVIL, *texts, more=wide))
    (tmp_path / "report.tex").write_text(source, encoding="utf-8")
    command = ["latexmk", "-pdf", "-norc", "-interaction=nonstopmode", "-halt-on-error"]
    command += ["-pdflatex=pdflatex -no-shell-escape %O %S", "report.tex"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    pages = [page.extract_text().strip() for page in PdfReader(tmp_path / "report.pdf").pages]
    found = re.sub(r"\s", "", "".join(re.sub(r"\d+$", "", page) for page in pages))

    for text in texts:
        assert found.count(text) >= 3, text
    assert r"\input{/etc/passwd}" in found
    assert "root:" not in found
    assert "^^41" in found
    assert "U+4E2D" in found
    assert "Overfull" not in (tmp_path / "report.log").read_text(errors="replace")
