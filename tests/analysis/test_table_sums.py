"""A table that is not as it was written is named, and nothing is made of it."""

import subprocess

import pytest

from dpprof.experiments.config.validation import InputError
from dpprof.results.analysis.tables.frames import SUMS, TableFolder, rows_of, write_sums


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "samplers.csv").write_text("layer,path\nLinear,hooks\n")
    (tmp_path / "missing.csv").write_text("method\nflash\n")
    write_sums(tmp_path, ["samplers.csv", "missing.csv"])
    return tmp_path


def test_the_checksums_are_those_of_sha256sum(folder) -> None:
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", SUMS], cwd=folder, capture_output=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, b"samplers.csv: OK\nmissing.csv: OK\n")


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.write_bytes(table.read_bytes()[:-1]),
        lambda table: table.write_text(table.read_text().replace("hooks", "<script>")),
        lambda table: table.write_text(table.read_text() + "Linear,hooks\n"),
        lambda table: (table.parent / SUMS).write_text("0" * 64 + "  missing.csv\n"),
        lambda table: (table.parent / SUMS).write_bytes(b"\xff\x00"),
    ],
)
def test_a_table_that_was_cut_or_edited_is_named(folder, damage) -> None:
    damage(folder / "samplers.csv")

    with pytest.raises(InputError, match=r"/samplers\.csv: was cut or edited after it was written"):
        TableFolder(folder)["samplers"]


def test_without_checksums_no_table_is_trusted(folder) -> None:
    (folder / SUMS).unlink()

    with pytest.raises(InputError, match=rf"/{SUMS}: is missing, .*samplers\.csv is whole"):
        TableFolder(folder)["samplers"]


def test_rows_of_a_table_that_was_edited_are_not_read_either(folder) -> None:
    (folder / "missing.csv").write_text("method\nghost\n")

    with pytest.raises(InputError, match=r"/missing\.csv: was cut or edited"):
        rows_of(TableFolder(folder), "missing", [("a", "clean", 0)])
