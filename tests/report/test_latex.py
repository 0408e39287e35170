"""Nothing in a text is LaTeX, and both routes to the PDF say the same."""

import re
import string
import subprocess
from pathlib import Path

import pytest
from factory import make_experiment, make_manifest, make_memory, write_synthetic
from pypdf import PdfReader

from dpprof.analysis.collection import collect
from dpprof.analysis.tables.build import build_tables
from dpprof.figures.outcomes import draw
from dpprof.planning.planner import Manifest
from dpprof.records.terms import COMPONENTS
from dpprof.report.content import build_document
from dpprof.report.rendering.document import Bullets, Document, Drawing, Paragraph, Section, Table
from dpprof.report.rendering.latex import (
    LatexError,
    compile_latex,
    escape_latex,
    has_latex,
    render_latex,
)
from dpprof.report.rendering.write import write_report

needs_latex = pytest.mark.skipif(not has_latex(), reason="no latexmk and pdflatex here")
EVIL = (
    r"a_b%c&d#e$f{g}~h^i\j<k>l|m`n'o" + '"p [q] *r --s \\input{/etc/passwd} \\\\ ^^41 é ü 中 \x1b'
)


def document_of(*texts: str) -> Document:
    cells = tuple((text, "1.0") for text in texts)
    blocks = (
        *(Paragraph(text=text) for text in texts),
        Bullets(items=texts),
        Table(caption=texts[0], header=("what", "n"), rows=cells, numeric=(False, True)),
        Table(caption="long", header=("what", "n"), rows=cells * 30, numeric=(False, True)),
    )
    return Document(
        title=texts[0], headline=texts, sections=(Section(title=texts[0], blocks=blocks),)
    )


def text_of(path: Path) -> str:
    """Extract a PDF's text without page numbers and what lies between letters."""
    pages = [page.extract_text().strip() for page in PdfReader(path).pages]
    text = "".join(re.sub(r"\d+( / \d+)?$", "", page) for page in pages)
    return re.sub(r"[\s\u200b\u00ad]", "", text)


def compiled(document: Document, folder: Path) -> str:
    source = folder / "report.tex"
    source.write_text(render_latex(document), encoding="utf-8")
    compile_latex(source, folder / "report.pdf")
    return text_of(folder / "report.pdf")


def test_specials_are_escaped_and_the_rest_is_itself() -> None:
    assert escape_latex("50% of $x_1$ & {y} #1 ~ ^ \\z") == (
        r"50\% of \$x\_1\$ \& \{y\} \#1 \textasciitilde{} \textasciicircum{} \textbackslash{}z"
    )
    plain = string.ascii_letters + string.digits + " .,:;!?()+=/@"
    assert escape_latex(plain) == plain
    assert escape_latex("é 中") == "é U+4E2D"


@needs_latex
@pytest.mark.parametrize("character", sorted(set(string.printable) - set(string.whitespace)))
def test_every_character_survives_alone_and_doubled(character, tmp_path_factory) -> None:
    """All of them in one PDF: compiled once, then looked for one by one."""
    path = tmp_path_factory.getbasetemp() / "characters.pdf"
    if not path.exists():
        texts = [f"x{c}{c}y" for c in sorted(set(string.printable) - set(string.whitespace))]
        found = compiled(document_of(*texts), tmp_path_factory.mktemp("characters"))
        path.write_text(found, encoding="utf-8")

    assert path.read_text(encoding="utf-8").count(f"x{character}{character}y") >= 3


@needs_latex
def test_hostile_text_is_shown_and_does_nothing(tmp_path) -> None:
    found = compiled(document_of(EVIL), tmp_path)

    assert r"\input{/etc/passwd}" in found
    assert "root:" not in found
    assert "^^41" in found
    assert "U+4E2D" in found


@needs_latex
def test_both_routes_say_the_same(tmp_path) -> None:
    good, bad = make_experiment(method="opacus-ghost"), make_experiment(method="opacus-hooks")
    standard = make_experiment(method="standard")
    for number in range(3):
        write_synthetic(tmp_path, standard, replicate=number, step_s=(0.01 + number / 1e4,))
        write_synthetic(tmp_path, good, replicate=number, step_s=(0.03 + number / 1e4,))
    # Typst's own fonts have no Chinese, and show an empty box.
    message = EVIL.replace("中", "")
    write_synthetic(tmp_path, bad, outcome="crashed", message=message)
    runs = [(standard, n) for n in range(3)] + [(good, n) for n in range(3)] + [(bad, 0)]
    planned = [*make_manifest(*runs).runs]
    recorded = make_memory(
        dict.fromkeys(COMPONENTS, 2**30), op="a_rather_long_operator_of_backward"
    )
    for experiment in (standard, good):
        write_synthetic(tmp_path, experiment, instrument="memory", recorded=recorded)
        planned += make_manifest((experiment, 0), instrument="memory").runs
    tables = build_tables(collect(Manifest(runs=tuple(planned)), tmp_path, partial=False))
    (tmp_path / "figures").mkdir()
    draw(tables).savefig(tmp_path / "figures" / "outcomes.pdf")
    drawing = Drawing(name="outcomes", caption="How runs ended.", missing=None)
    document = build_document(tables, [drawing])

    texts = {}
    for route in ("latex", "typst"):
        write_report(document, tmp_path, route)
        texts[route] = text_of(tmp_path / "report.pdf")
        assert len(PdfReader(tmp_path / "report.pdf").pages) >= 2

    said = [document.question, *document.headline]
    for section in (*document.sections, *document.appendix):
        said.append(section.title)
        for block in section.blocks:
            said += [block.text] if isinstance(block, Paragraph) else []
            said += block.items if isinstance(block, Bullets) else []
            if isinstance(block, Table):
                said += [block.caption, *block.header, *(c for row in block.rows for c in row)]
    assert len(said) > 50
    for text in said:
        squeezed = re.sub(r"\s", "", text)
        assert squeezed in texts["typst"], text
        assert squeezed in texts["latex"], text


@needs_latex
@pytest.mark.parametrize("rows", [3, 30])
@pytest.mark.parametrize("long", ["short", "a long text of many words " * 5])
def test_a_wide_table_fits_the_page(rows, long, tmp_path) -> None:
    header = ("method", "what was said", *["per sample gradients"] * 8)
    cells = ("opacus-fast-gradient-clipping", long, *["12,345.6"] * 8)
    table = Table(
        caption="wide",
        header=header,
        rows=(cells,) * rows,
        numeric=tuple(number > 1 for number in range(len(header))),
    )
    section = Section(title="t", blocks=(table,))
    source = render_latex(Document(title="t", headline=("h",), sections=(section,)))
    (tmp_path / "report.tex").write_text(source)
    command = ["pdflatex", "-interaction=nonstopmode", "report.tex"]
    # Twice: a longtable learns its widths from the first time.
    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    assert "Overfull" not in (tmp_path / "report.log").read_text(errors="replace")


@needs_latex
def test_what_latex_complained_about_is_told(tmp_path) -> None:
    source = tmp_path / "report.tex"
    source.write_text(r"\documentclass{article}\begin{document}\nonsense\end{document}")

    with pytest.raises(LatexError, match="Undefined control sequence"):
        compile_latex(source, tmp_path / "report.pdf")
    assert not (tmp_path / "report.pdf").exists()


def test_without_latex_typst_makes_the_pdf(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    write_report(document_of("one"), tmp_path)

    assert "one" in text_of(tmp_path / "report.pdf")
    assert r"\section*{one}" in (tmp_path / "report.tex").read_text()
    with pytest.raises(LatexError):
        write_report(document_of("one"), tmp_path, "latex")


def test_a_latex_that_fails_is_told_and_typst_makes_the_pdf(tmp_path, monkeypatch, capsys) -> None:
    for program in ("latexmk", "pdflatex"):
        path = tmp_path / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\nexit 3\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    write_report(document_of("one"), tmp_path)

    assert "latexmk ended with exit code 3" in capsys.readouterr().err
    assert "one" in text_of(tmp_path / "report.pdf")


def test_tables_use_booktabs() -> None:
    source = render_latex(document_of("one"))

    for command in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{tabular}{lr}"):
        assert command in source
    assert r"\begin{longtable}{lr}" in source
