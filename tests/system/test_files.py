import errno
import json
import os
import socket
from functools import partial
from pathlib import Path

import pytest

from dpprof.system import files
from dpprof.system.files import (
    canonical_json,
    check_writable,
    read_json,
    sha256_hex,
    write_atomically,
    write_if_changed,
)


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": 1.0, "a": ["é", None]}) == '{"a":["\\u00e9",null],"b":1.0}'


def test_canonical_json_refuses_what_json_has_not() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_sha256_of_a_known_text() -> None:
    # FIPS 180-2, appendix B.1
    assert sha256_hex("abc").startswith("ba7816bf8f01cfea414140de5dae2223")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, "old")

    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\udcff cannot be encoded")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_if_changed_keeps_the_age_of_an_unchanged_file(tmp_path) -> None:
    path = tmp_path / "x"

    assert write_if_changed(path, "a")
    before = path.stat().st_mtime_ns
    assert not write_if_changed(path, "a")
    assert path.stat().st_mtime_ns == before
    assert write_if_changed(path, "b")
    assert path.read_text() == "b"


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere" / "nowhere")


SPECIAL = [
    (make_pipe, "is a device, a pipe or a socket, not a file to write"),
    (make_socket, "is a device, a pipe or a socket, not a file to write"),
    (link_to_a_device, "is a device, a pipe or a socket, not a file to write"),
    (link_to_nothing, "is a link to nothing, not a file to write"),
    (Path.mkdir, "is a folder, not a file to write"),
]


WRITING = [
    partial(write_atomically, content="x"),
    partial(write_if_changed, text="x"),
    check_writable,
]


@pytest.mark.parametrize("write", WRITING)
@pytest.mark.parametrize(("make", "sentence"), SPECIAL, ids=[m.__name__ for m, _ in SPECIAL])
def test_only_a_regular_file_is_replaced(tmp_path, monkeypatch, make, sentence, write) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("x.json")
    make(path)
    kind = path.lstat().st_mode

    with pytest.raises(OSError, match=rf"{sentence}: 'x\.json'$"):
        write(path)
    assert path.lstat().st_mode == kind
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


def test_a_link_to_a_file_stays_and_the_file_is_replaced(tmp_path) -> None:
    file, link = tmp_path / "there" / "x.json", tmp_path / "x.json"
    file.parent.mkdir()
    file.write_text("old")
    link.symlink_to(file)
    write_atomically(link, "new")

    assert link.is_symlink()
    assert file.read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["there", "x.json", "x.json"]


def test_a_full_disk_is_told_with_the_files_name(tmp_path, monkeypatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(OSError, match=r"No space left on device: '.*/x\.json'$"):
        write_atomically(tmp_path / "x.json", "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", WRITING)
def test_what_is_in_the_place_of_a_folder_is_named(tmp_path, monkeypatch, write) -> None:
    monkeypatch.chdir(tmp_path)
    Path("results").symlink_to("nowhere/at/all")
    Path("file").write_text("")

    with pytest.raises(OSError, match=r"is a link to nothing, not a folder: 'results'$"):
        write(Path("results/plan/x.json"))
    with pytest.raises(OSError, match=r"Not a directory: 'file/x\.json'$"):
        write(Path("file/x.json"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"a": ' * 100_000, "it is nested too deep"),
        (b"[" * 100_000, "it is nested too deep"),
        (b"1" * 10_000, "it holds a number that is too large"),
        (b'{"a": [9223372036854775808]}', "it holds a number that is too large"),
        (b'{"a": [-9223372036854775808]}', "it holds a number that is too large"),
        (b'{"a": [1.1e+30]}', "it holds a number that is too large"),
        (b'{"a": [-Infinity, 1e999]}', "it holds a number that is too large"),
        (b"[" * 900 + b"1e31" + b"]" * 900, "it holds a number that is too large"),
        (b"\xff\xfe", "codec can't decode"),
        (b'{"a": 1', "Expecting ',' delimiter"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json_that_nobody_wrote_is_a_value_error(tmp_path, content, problem) -> None:
    (tmp_path / "x.json").write_bytes(content)

    with pytest.raises(ValueError, match=problem):
        read_json(tmp_path / "x.json")


def test_numbers_that_can_be_calculated_with_are_read(tmp_path) -> None:
    numbers = [2**63 - 1, 1 - 2**63, 1e30, -1e30, 1e-300, "1" * 30, "1e99"]
    (tmp_path / "x.json").write_text(json.dumps(numbers))

    assert read_json(tmp_path / "x.json") == numbers


def test_a_pipe_in_place_of_json_keeps_nobody_waiting(tmp_path) -> None:
    make_pipe(tmp_path / "x.json")

    with pytest.raises(ValueError, match="it is not a file"):
        read_json(tmp_path / "x.json")


def test_what_is_written_part_by_part_appears_as_a_whole_or_not_at_all(tmp_path) -> None:
    path = tmp_path / "x"
    with files.open_atomically(path) as file:
        file.write(b"one ")
        assert not path.exists()
        file.write(b"two")
    assert path.read_bytes() == b"one two"

    def fail() -> None:
        with files.open_atomically(path) as file:
            file.write(b"three")
            (tmp_path / "elsewhere").read_bytes()

    with pytest.raises(FileNotFoundError, match="elsewhere"):
        fail()
    assert path.read_bytes() == b"one two"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [True, False])
def test_only_a_durable_write_waits_for_the_disk(tmp_path, monkeypatch, durable) -> None:
    waited = []
    monkeypatch.setattr(os, "fsync", waited.append)

    files.write_if_changed(tmp_path / "x", "x", durable=durable)
    assert (tmp_path / "x").read_text(encoding="utf-8") == "x"
    assert bool(waited) is durable
