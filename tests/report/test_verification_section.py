"""The report says how far to trust it, and marks what is not verified wherever it stands."""

import pytest
from factory import (
    make_experiment,
    make_memory,
    make_predicted_time,
    tables_of_runs,
    write_synthetic_verdict,
)
from pypdf import PdfReader
from reading import section_of, trust_of

from dpprof.results.report.answer.first_page import build_trust_section
from dpprof.results.report.content import build_document
from dpprof.results.report.rendering.write import render_markdown, write_report
from dpprof.results.report.sections.outcomes import VERIFICATION as TITLE

METHODS = ("standard", "opacus-ghost", "opacus-hooks", "opacus")
STANDARD, GHOST, HOOKS, SHORT = (make_experiment(method=name) for name in METHODS)
DAGGER, DOUBLE_DAGGER = "\N{DAGGER}", "\N{DOUBLE DAGGER}"


def document_of(root, *experiments):
    runs = [(experiment, "clean", {}) for experiment in experiments]
    return build_document(tables_of_runs(root, *runs), [])


@pytest.fixture
def document(tmp_path):
    """Of four methods two are verified; one's name is the beginning of another's."""
    wrong = {"max_relative_error": 0.0312, "reason": "relative error of the gradient: 3.1e-02"}
    write_synthetic_verdict(tmp_path, GHOST, False, **wrong)
    write_synthetic_verdict(tmp_path, HOOKS, None, reason="the process ended")
    return document_of(tmp_path, STANDARD, GHOST, HOOKS)


def captions_of(document):
    sections = (*document.sections, *document.appendix)
    return [block.caption for one in sections for block in one.blocks if block.kind == "table"]


def rows_of(document, title):
    section = section_of(document, title)
    return [row for block in section.blocks if block.kind == "table" for row in block.rows]


def test_the_first_lines_count_them_and_names_the_others(document) -> None:
    assert (
        "The gradients of 1 of 3 methods (standard included) were verified to be right; failed: "
        "opacus-ghost; not verified: opacus-hooks; marked \N{DAGGER}."
    ) in trust_of(document)


def test_a_section_tells_error_reference_and_verdict(document) -> None:
    flat, reference = ("flat clipping", "all as one"), ("-", "microbatch and torch.func")
    reason = "relative error of the gradient: 3.1e-02"

    assert rows_of(document, TITLE) == [
        ("opacus-ghost", *flat, "3.1e-02", *reference, "failed", reason),
        ("opacus-hooks", *flat, "1.0e-16", *reference, "not verified", "the process ended"),
        ("standard", *flat, "1.0e-16", *reference, "verified", "-"),
    ]
    assert [block.kind for block in section_of(document, TITLE).blocks] == ["table"]  # no holes


def test_tables_and_the_answer_mark_them(document) -> None:
    compared = {row[3]: row for row in rows_of(document, "Comparison")}
    assert set(compared) == {f"opacus-ghost{DAGGER}", f"opacus-hooks{DAGGER}", "standard"}
    assert f"opacus-ghost{DAGGER}" in document.headline[0]
    captions = captions_of(document)
    assert sum(f"{DAGGER} Not verified, see: {TITLE}" in caption for caption in captions) == 3


def test_a_name_within_a_name_is_left_alone(tmp_path) -> None:
    write_synthetic_verdict(tmp_path, SHORT, False, reason="x")
    document = document_of(tmp_path, STANDARD, GHOST, SHORT)

    names = {row[3] for row in rows_of(document, "Comparison")}
    assert names == {"standard", "opacus-ghost", f"opacus{DAGGER}"}


def test_where_all_are_verified_there_is_no_dagger(tmp_path) -> None:
    document = document_of(tmp_path, STANDARD, GHOST)

    assert DAGGER not in render_markdown(document)
    assert "The gradients of 2 of 2 methods (standard included) were verified" in trust_of(document)
    assert "why" not in section_of(document, TITLE).blocks[0].header


def test_groups_say_how_far_the_sum_can_move(tmp_path) -> None:
    case = {"attention": "sdpa", "batch_size": 4, "outcome": "passed", "groups": 14}
    for experiment, sensitivity in ((GHOST, 1.0), (HOOKS, 3.7417)):
        cases = [case | {"sensitivity": sensitivity}]
        write_synthetic_verdict(tmp_path, experiment, cases=cases)
    rows = rows_of(document_of(tmp_path, GHOST, HOOKS), TITLE)

    assert [row[2] for row in rows] == ["14 groups", "14 groups, to 3.74 C in all"]


@pytest.fixture
def mixed(tmp_path):
    """Two mechanisms; the method of the other one is not verified, and both have holes."""
    ill = "one non-finite sample: the gradient is not finite"
    thawed = "a layer thawed after set-up: the gradient is not the reference's"
    told = {"mechanism": "adaptive flat clipping", "reason": "the process ended"}
    write_synthetic_verdict(tmp_path, GHOST, None, holes=[thawed, ill], **told)
    write_synthetic_verdict(tmp_path, HOOKS, holes=[ill])
    return document_of(tmp_path, STANDARD, GHOST, HOOKS)


def test_another_mechanism_is_named_and_marked_wherever_methods_are_compared(mixed) -> None:
    ghost = f"opacus-ghost{DAGGER}{DOUBLE_DAGGER}"

    mechanisms = [row[1] for row in rows_of(mixed, TITLE)]
    assert mechanisms == ["adaptive flat clipping", "flat clipping", "flat clipping"]
    assert {row[3] for row in rows_of(mixed, "Comparison")} == {ghost, "opacus-hooks", "standard"}
    assert ghost in mixed.headline[0]
    captions = captions_of(mixed)
    note = f"{DOUBLE_DAGGER} Another mechanism than flat clipping, see: {TITLE}"
    assert sum(note in caption for caption in captions) == 3
    assert (
        f"Other mechanisms than flat clipping: opacus-ghost; marked {DOUBLE_DAGGER}."
        in trust_of(mixed)
    )


def test_holes_are_told_once_each_with_the_methods(mixed) -> None:
    (holes,) = [block.items for block in section_of(mixed, TITLE).blocks if block.kind == "bullets"]

    assert holes == (
        "a layer thawed after set-up: the gradient is not the reference's (opacus-ghost)",
        "one non-finite sample: the gradient is not finite (opacus-ghost, opacus-hooks)",
    )


def test_every_format_has_both_signs(mixed, tmp_path) -> None:
    write_report(mixed, tmp_path)
    pages = "".join(page.extract_text() for page in PdfReader(tmp_path / "report.pdf").pages)
    markdown, latex = ((tmp_path / f"report.{kind}").read_text() for kind in ("md", "tex"))

    for text in (pages, markdown):
        assert {DAGGER, DOUBLE_DAGGER} <= set(text)
    assert r"\textdagger{}" in latex
    assert r"\textdaggerdbl{}" in latex


@pytest.mark.parametrize("instrument", ["memory", "estimate"])
def test_peaks_are_recorded_or_predicted(tmp_path, instrument) -> None:
    runs = []
    for gap, method in enumerate(("standard", "flash")):
        one, held = make_experiment(method=method), make_memory({"parameters": 2**20 + 8 * gap})
        held |= {"time": make_predicted_time(0.02)} if instrument == "estimate" else {}
        runs.append((one, "clean", {"peak_allocated_bytes": 2**20, "step_s": (0.021 + gap,)}))
        # A replicate of a prediction is no other experiment.
        runs += [(one, instrument, {"recorded": held, "replicate": number}) for number in (0, 1)]
    [lines] = build_trust_section(tables_of_runs(tmp_path, *runs)).blocks
    said = {
        "memory": "Recorded peaks agree with the allocator's in 2 of 2 experiments (largest gap ",
        "estimate": (
            "On this machine 1 of 2 predicted memory peaks are exact; the largest gap is 8 "
            "bytes. On this machine steps take 1.05 to 51.05 times the predicted time; 1 of 2 step "
            "times are inside the predicted 90 % interval."
        ),
    }

    assert said[instrument] in lines.items[0]
