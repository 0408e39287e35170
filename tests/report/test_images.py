"""Images in tables and sentences: pixels in place of tokens, and samples a second."""

from factory import make_experiment, tables_of_runs

from dpprof.results.analysis.tables.axes import (
    axes_of,
    count_tokens,
    name_size,
    name_speed,
    size_cell,
)
from dpprof.results.report.sections.step_time import compare
from dpprof.results.report.wording import name_setting

IMAGE = make_experiment(model="wrn-16-4", seq_len=None, batch_size=8)
TEXT = make_experiment(model="tiny", seq_len=128, batch_size=8)


def test_an_image_counts_as_one_token_and_says_its_pixels() -> None:
    rows = [axes_of(IMAGE), axes_of(TEXT)]

    assert [count_tokens(row) for row in rows] == [8, 1024]
    assert [name_size(row) for row in rows] == ["32 x 32 pixels", "T = 128"]
    assert [size_cell(row) for row in rows] == ["32 px", "128"]
    assert [name_speed(rows[:1]), name_speed(rows[1:])] == ["samples/s", "tokens/s"]
    assert name_speed(rows) == "tokens or samples/s"
    assert name_setting(rows[0]) == "wrn-16-4 (32 x 32 pixels, B = 8)"


def test_a_report_tells_samples_a_second(tmp_path) -> None:
    runs = [(IMAGE, "clean", {"step_s": (0.5,)})]
    [table] = compare(tables_of_runs(tmp_path / "images", *runs)["experiments"])
    both = [*runs, (TEXT, "clean", {"step_s": (2.0,)})]
    [mixed] = compare(tables_of_runs(tmp_path / "both", *both)["experiments"])
    found = dict(zip(table.header, table.rows[0], strict=True))
    sizes = {dict(zip(mixed.header, row, strict=True))["T"] for row in mixed.rows}

    assert (found["T"], found["samples/s"]) == ("32 px", "16")
    assert "tokens/s" not in table.header
    assert sizes == {"32 px", "128"}
    assert "tokens or samples/s" in mixed.header
