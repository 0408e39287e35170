import re

import pytest
from factory import make_experiment, make_manifest, write_synthetic
from pypdf import PdfReader

from dpprof.analysis.collection import collect
from dpprof.analysis.tables import build_tables
from dpprof.figures.tradeoff import draw
from dpprof.report.content import build_document
from dpprof.report.document import Document, Paragraph, Section
from dpprof.report.render import escape_markdown, render_markdown, render_summary, write_report

EVIL = (
    "<script>alert(1)</script> \\input{/etc/passwd} $(touch pwned) `id` |x| _a_ #set [l](u)\x1b[2J"
)
GOOD = make_experiment(method="standard")
SLOW = make_experiment(method="opacus-ghost")
BAD = make_experiment(method="opacus-hooks")


def document_of(tmp_path, *, partial: bool = False, only_failures: bool = False) -> Document:
    if not only_failures:
        write_synthetic(tmp_path, GOOD, step_s=(0.010,), peak_rss_bytes=100 * 2**20)
        write_synthetic(tmp_path, SLOW, step_s=(0.025,), peak_rss_bytes=150 * 2**20, attempts=2)
    write_synthetic(tmp_path, BAD, outcome="crashed", message=EVIL)
    runs = [(BAD, 0)] if only_failures else [(GOOD, 0), (SLOW, 0), (BAD, 0)]
    if partial:
        runs.append((BAD, 1))
    tables = build_tables(collect(make_manifest(*runs), tmp_path, partial=partial))
    (tmp_path / "figures").mkdir(exist_ok=True)
    draw(tables["experiments"]).savefig(tmp_path / "figures" / "tradeoff.pdf")
    return build_document(tables, {"tradeoff": "Memory against time."})


def pdf_text(path) -> str:
    text = "".join(page.extract_text() for page in PdfReader(path).pages)
    return text.replace("\u200b", "")


def test_all_formats_say_the_same(tmp_path) -> None:
    write_report(document_of(tmp_path), tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    summary = (tmp_path / "summary.txt").read_text()
    squeezed = re.sub(r"\s", "", pdf_text(tmp_path / "report.pdf"))

    for text in ("3 runs of 3 experiments: 2 ok (67%).", "opacus-ghost", "25.0", "2.50", "150"):
        assert text in markdown.replace("\\", "")
        assert text in summary
        assert re.sub(r"\s", "", text) in squeezed


def test_failures_are_listed_with_kind_phase_and_log(tmp_path) -> None:
    markdown = render_markdown(document_of(tmp_path)).replace("\\", "")

    row = next(line for line in markdown.splitlines() if line.startswith(f"| {BAD.id} clean r0"))
    for text in ("crashed", "SyntheticError", "backward", "x.log"):
        assert text in row


def test_a_message_injects_nothing(tmp_path) -> None:
    write_report(document_of(tmp_path), tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    summary = (tmp_path / "summary.txt").read_text()
    text = pdf_text(tmp_path / "report.pdf")

    assert "<script>" not in markdown
    assert not re.search(r"(?<!\\)[`$|*_]\b(id|\(touch|x)", markdown)
    assert "\x1b" not in markdown + summary + (tmp_path / "report.json").read_text()
    assert "<script>alert(1)</script>" in re.sub(r"\s", "", text)  # shown, as text
    assert "#set" in text
    assert not (tmp_path / "pwned").exists()


def test_only_failures_still_make_a_report(tmp_path) -> None:
    write_report(document_of(tmp_path, only_failures=True), tmp_path)

    assert "No experiment succeeded" in pdf_text(tmp_path / "report.pdf")
    assert "1 run of 1 experiment: 0 ok (0%)." in (tmp_path / "summary.txt").read_text()


def test_a_partial_report_says_so_and_lists_the_missing(tmp_path) -> None:
    markdown = render_markdown(document_of(tmp_path, partial=True)).replace("\\", "")

    assert "This report is partial: 1 planned run has no result yet." in markdown
    assert f"- {BAD.id} clean r1" in markdown


def test_a_second_attempt_is_told(tmp_path) -> None:
    assert f"Succeeded only at the second attempt: {SLOW.id}." in render_markdown(
        document_of(tmp_path)
    ).replace("\\", "")


@pytest.mark.parametrize("character", list("\\`*_{}[]|#$~!"))
def test_markdown_punctuation_means_itself(character: str) -> None:
    assert escape_markdown(f"a{character}b") == f"a\\{character}b"


def test_line_breaks_cannot_start_markup() -> None:
    block = Paragraph(text="one\n# two\r\n| three")
    document = Document(title="t", headline=(), sections=(Section(title="s", blocks=(block,)),))

    assert "one \\# two \\| three" in render_markdown(document)
    assert render_summary(document).startswith("t\n")
