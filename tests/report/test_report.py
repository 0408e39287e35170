"""What the report says of times, failures and caveats, and that every format says it."""

import re
from collections.abc import Iterator

import pandas as pd
import pytest
from factory import make_experiment, tables_of_runs
from pydantic import BaseModel
from pypdf import PdfReader
from reading import table_of, titles_of, trust_of

from dpprof.results.analysis.tables import axes
from dpprof.results.figures.outcomes import draw
from dpprof.results.report.content import build_document
from dpprof.results.report.rendering.document import Document, Drawing, Paragraph, Section
from dpprof.results.report.rendering.templates import escape_markdown
from dpprof.results.report.rendering.write import render_markdown, write_report
from dpprof.results.report.sections.outcomes import tell_caveats
from dpprof.results.report.sections.step_time import compare
from dpprof.results.report.sections.tables import MAX_ROWS
from dpprof.results.report.wording import name_setting

EVIL = (
    "<script>alert(1)</script> \\input{/etc/passwd} $(touch pwned) `id` |x| _a_ #set [l](u)\x1b[2J"
)
GOOD = make_experiment(method="standard")
SLOW = make_experiment(method="opacus-ghost")
BAD = make_experiment(method="opacus-hooks")


def document_of(root) -> Document:
    tables = tables_of_runs(
        root,
        (GOOD, "clean", {"step_s": (0.010,), "peak_rss_bytes": 100 * 2**20}),
        (SLOW, "clean", {"step_s": (0.025,), "peak_rss_bytes": 150 * 2**20, "attempts": 2}),
        (BAD, "clean", {"outcome": "crashed", "message": EVIL}),
    )
    (root / "figures").mkdir(exist_ok=True)
    draw(tables).savefig(root / "figures" / "outcomes.pdf")
    drawings = [
        Drawing(name="outcomes", caption="How runs ended.", missing=None),
        Drawing(name="seq-len", caption="Growth.", missing="no two lengths"),
    ]
    return build_document(tables, drawings)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report, its Markdown without backslashes, and the text of its PDF without white space."""
    folder = tmp_path_factory.mktemp("report")
    document = document_of(folder)
    write_report(document, folder)
    pdf = "".join(page.extract_text() for page in PdfReader(folder / "report.pdf").pages)
    markdown = (folder / "report.md").read_text()
    return document, markdown, re.sub(r"[\s\u200b]", "", pdf)


def find_texts(value) -> Iterator[str]:
    """Yield the texts that a part of a document shows."""
    if isinstance(value, BaseModel):
        for name in set(type(value).model_fields) - {"kind", "name"}:
            yield from find_texts(getattr(value, name))
    elif isinstance(value, tuple):
        for one in value:
            yield from find_texts(one)
    elif isinstance(value, str):
        yield value


def test_the_pdf_and_markdown_have_every_text(written) -> None:
    document, markdown, pdf = written
    texts = list(find_texts(document))

    assert len(texts) > 50
    for text in texts:
        assert escape_markdown(text) in markdown
        assert re.sub(r"\s", "", text) in pdf, text
    assert {"opacus-ghost", "25.0", "2.50", "150.0"} <= set(texts)


def test_failures_are_listed_with_kind_phase_and_log(written) -> None:
    lines = written[1].replace("\\", "").splitlines()

    row = next(line for line in lines if line.startswith(f"| {BAD.id} clean r0"))
    for text in ("crashed", "SyntheticError", "backward", "x.log"):
        assert text in row


def test_a_message_injects_nothing(written) -> None:
    document, markdown, pdf = written

    assert "<script>" not in markdown
    assert not re.search(r"(?<!\\)[`$|*_]\b(id|\(touch|x)", markdown)
    assert "\x1b" not in markdown + document.model_dump_json()
    assert "<script>alert(1)</script>" in pdf  # shown, as text
    assert "#set" in pdf


def test_a_second_attempt_is_told(written) -> None:
    said = f"These succeeded only at the second attempt: {SLOW.id}."
    assert said in written[1].replace("\\", "")


def measured_document(root, standard, ghost, **fields) -> Document:
    """Two replicated experiments with these step times, and what ``fields`` add to ghost."""
    runs = [
        (GOOD, "clean", {"replicate": n, "step_s": (seconds,), "peak_allocated_bytes": 2**20})
        for n, seconds in enumerate(standard)
    ]
    for number, seconds in enumerate(ghost):
        known = {"replicate": number, "step_s": (seconds,), "peak_allocated_bytes": 2**21}
        known |= {name: values[number] for name, values in fields.items()}
        runs.append((SLOW, "clean", known))
    return build_document(tables_of_runs(root, *runs), [])


def test_a_ratio_has_its_interval_and_the_floor_is_stated(tmp_path) -> None:
    document = measured_document(tmp_path, [0.010, 0.0101, 0.0099], [0.030, 0.031, 0.029])
    ghost = next(r for r in table_of(document, "Comparison") if r["method"] == "opacus-ghost")
    markdown = render_markdown(document)

    assert ghost["step (ms)"] == "30.0"
    assert ghost["interval"] == "29.0 to 31.0"
    assert ghost["time ratio"] == "3.00 (2.87 to 3.13)"
    assert (ghost["peak (MiB)"], ghost["peak ratio"], ghost["n"]) == ("2.0", "2.00", "3")
    assert "covers 75 % at most" in markdown
    assert "the noise floor" in markdown
    assert "equal to the byte in all processes of each of the 2 replicated" in markdown
    assert "Caveats" not in titles_of(document)
    assert "caveat" not in trust_of(document)


def test_below_the_floor_it_reads_no_difference_detected(tmp_path) -> None:
    document = measured_document(tmp_path, [0.010, 0.012, 0.008], [0.011, 0.009, 0.0105])
    ghost = next(r for r in table_of(document, "Comparison") if r["method"] == "opacus-ghost")

    assert ghost["time ratio"] == "no difference detected"


def test_how_far_figures_repeat_is_told(tmp_path) -> None:
    document = measured_document(
        tmp_path,
        [0.010],
        [0.03, 0.04],
        peak_rss_bytes=[2**20, 2**21],
        peak_reserved_bytes=[2**22, 2**22],
    )

    rows = table_of(document, "How far the figures repeat")
    assert [
        (r["method"], r["step (ms)"], r["allocated"], r["reserved (MiB)"], r["RSS (MiB)"])
        for r in rows
    ] == [("opacus-ghost", "30.0 to 40.0", "equal in 2", "4.0 to 4.0", "1.0 to 2.0")]


def test_caveats_are_counted_on_the_first_page_and_come_first_in_the_appendix(tmp_path) -> None:
    document = measured_document(
        tmp_path, [0.01], [0.03, 0.03], peak_allocated_bytes=[2**20, 2**20 + 1]
    )

    assert document.appendix[0].title == "Caveats"
    found = table_of(document, "Caveats")
    assert found[0]["caveat"].startswith("peak_allocated_bytes differs between processes: r0 1,048")
    assert "1 caveat, see Caveats: peaks differ between processes (1)." in trust_of(document)
    assert "equal to the byte" not in render_markdown(document)


def test_phases_and_code_paths_are_told(tmp_path) -> None:
    document = measured_document(
        tmp_path,
        [0.01],
        [0.03],
        phases_s=[{"forward": [0.010], "backward": [0.020]}],
        samplers=[{"Linear": "norm sampler", "Scale": "functorch"}],
    )

    phases = table_of(document, "Phases")
    assert [(r["forward"], r["backward"], r["sum"]) for r in phases] == [("10.0", "20.0", "30.0")]
    paths = table_of(document, "Code paths")
    assert [(r["layer"], r["path"]) for r in paths] == [
        ("Linear", "norm sampler"),
        ("Scale", "functorch"),
    ]
    assert "fell back to functorch for Scale" in render_markdown(document)


@pytest.mark.parametrize("character", list("\\`*_{}[]|#$~!"))
def test_markdown_punctuation_means_itself(character: str) -> None:
    assert escape_markdown(f"a{character}b") == f"a\\{character}b"


def test_line_breaks_cannot_start_markup() -> None:
    block = Paragraph(text="one\n# two\r\n| three")
    document = Document(title="t", headline=(), sections=(Section(title="s", blocks=(block,)),))

    assert "one \\# two \\| three" in render_markdown(document)


@pytest.mark.parametrize("count", [0, 1, MAX_ROWS, MAX_ROWS + 1])
def test_caveats_are_listed_one_by_one_as_long_as_they_are_few(count) -> None:
    rows = [("fallback", f"e{number}", "clean", f"finding {number}") for number in range(count)]
    columns = pd.Index(["kind", "experiment_id", "instrument", "finding"])
    blocks = tell_caveats(pd.DataFrame(rows, columns=columns))

    if count > MAX_ROWS:
        assert "61 rows: see results/tables/findings.csv" in blocks[0].text
        return
    told = [row for table in blocks for row in table.rows]
    assert len(told) == count
    assert told[:1] == [("e0 clean", "finding 0")][:count]


IMAGE = make_experiment(model="wrn-16-4", seq_len=None, batch_size=8)
TEXT = make_experiment(model="tiny", seq_len=128, batch_size=8)


def test_an_image_counts_as_one_token_and_says_its_pixels() -> None:
    rows = [axes.axes_of(IMAGE), axes.axes_of(TEXT)]

    assert [axes.count_tokens(row) for row in rows] == [8, 1024]
    assert [axes.name_size(row) for row in rows] == ["32 x 32 pixels", "T = 128"]
    assert [axes.size_cell(row) for row in rows] == ["32 px", "128"]
    assert [axes.name_speed(rows[:1]), axes.name_speed(rows[1:])] == ["samples/s", "tokens/s"]
    assert axes.name_speed(rows) == "tokens or samples/s"
    assert name_setting(rows[0]) == "wrn-16-4 (32 x 32 pixels, B = 8)"


def test_a_report_tells_samples_a_second(tmp_path) -> None:
    runs = [(IMAGE, "clean", {"step_s": (0.5,)})]
    [table] = compare(tables_of_runs(tmp_path / "images", *runs)["experiments"])
    both = [*runs, (TEXT, "clean", {"step_s": (2.0,)})]
    [mixed] = compare(tables_of_runs(tmp_path / "both", *both)["experiments"])
    told = dict(zip(table.header, table.rows[0], strict=True))
    sizes = {dict(zip(mixed.header, row, strict=True))["T"] for row in mixed.rows}

    assert (told["T"], told["samples/s"]) == ("32 px", "16")
    assert "tokens/s" not in table.header
    assert sizes == {"32 px", "128"}
    assert "tokens or samples/s" in mixed.header
