"""Config files that can be misread, executed, or that take for ever."""

import os
import time
from pathlib import Path

import pytest
import yaml

from dpprof.experiments.config.config_files import (
    parse_config_text,
    read_config_file,
    refuse_config_files,
)
from dpprof.experiments.config.validation import InputError

ROOT = Path(__file__).parents[2]

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

BAD = [
    (b"a: 1\nb: 2\na: 3\n", "the key 'a' occurs twice in the mapping that begins in line 1"),
    (b"sweeps:\n  x: {m: 1}\n  x: {m: 2}\n", "the key 'x' occurs twice in the mapping that beg"),
    (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice in a mapping; write it once"),
    (b"__use_yte__: true\na: ?print(1)\n", "the key __use_yte__ is not allowed, because Snakemake"),
    (
        b"b: &b {__use_yte__: true}\n<<: *b\n",
        "the key __use_yte__ is not allowed, because Snakemake",
    ),
    (b"a: \xff\n", "is not UTF-8 text, see byte 4"),
    (b"a: " + b"[" * 100_000, "nests deeper than 50 levels"),
    (b'{"a": ' * 100_000, "nests deeper than 50 levels"),
    (b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", "nests deeper than 50 levels"),
    (b'{"a": [' + b"1, " * 1_000_000 + b"1]}", "holds more than 100,000 values"),
    (b"a: &a [*a]", "nests deeper than 50 levels, or contains itself"),
    (BOMB.encode(), "holds more than 100,000 values"),
    (MERGE_BOMB.encode(), "holds more than 100,000 values"),
    (b"a: [" + b"1, " * 1_000_000 + b"]", "holds more than 100,000 values"),
    (b"x" * 2**25, "is larger than 16 MiB"),
    (b"a: " + b"1" * 10_000, "holds a value that cannot be read: Exceeds the limit (4300"),
    (b"a: 2024-13-45", "holds a value that cannot be read: month must be in 1..12"),
    (b"a: [1", "is not YAML: did not find expected ',' or ']', line 2"),
    (b"a: 1\n--- b\n", "is not YAML: but found another document, line 2"),
    (b"a: !!python/object/apply:os.system [x]", "is not YAML: could not determine a constructor"),
    (b"a: \x1b[2J", "holds a value that cannot be read: unacceptable character #x001b"),
    (b"? [1, 2]\n: 3\n", "line 1: a key must be a name"),
    (b"timeout_s: 4:00", "line 1: 4:00 is not allowed; YAML reads it as an octal number or as min"),
    (b"batch_size: 010", "line 1: 010 is not allowed; YAML reads it as an octal number or as min"),
]


@pytest.mark.parametrize(("content", "problem"), BAD, ids=[problem[:40] for _, problem in BAD])
def test_a_file_that_could_be_misread_is_refused_in_a_sentence(tmp_path, content, problem) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(content)
    start = time.monotonic()

    with pytest.raises(InputError) as caught:
        read_config_file(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}: {problem}")
    assert "\n" not in sentence
    assert len(sentence) < len(str(path)) + 250
    assert time.monotonic() - start < 30


def test_a_pipe_in_place_of_a_config_keeps_nobody_waiting(tmp_path) -> None:
    os.mkfifo(tmp_path / "my.yaml")

    with pytest.raises(InputError, match=r"my\.yaml: is not a file"):
        read_config_file(tmp_path / "my.yaml")


GOOD = [
    ("", None),
    ("a: 1e5\nb: [0, 10, 0.5, 1_000]", {"a": "1e5", "b": [0, 10, 0.5, 1000]}),
    ('{"a": 1e5,\t"b": "0100"}', {"a": 100000.0, "b": "0100"}),
    ("{a: '010', b: '4:00'}", {"a": "010", "b": "4:00"}),
    (
        "a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b}\nd: *b",
        {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 2}, "d": {"x": 2}},
    ),
]


@pytest.mark.parametrize(("text", "value"), GOOD)
def test_what_is_meant_is_read(text: str, value: object) -> None:
    assert parse_config_text(text) == value


@pytest.mark.parametrize("path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_read_as_yaml_reads_them(path: Path) -> None:
    assert read_config_file(path) == yaml.safe_load(path.read_text())


ORDERS = [
    ["--configfile", "good.yaml", "bad.yaml"],
    ["--configfile=bad.yaml", "-n"],
    ["-c", "4", "--configfiles", "bad.yaml", "--config", "partial=true"],
    ["--configfile", "good.yaml", "--configfile", "bad.yaml", "--", "all"],
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text("sweeps: {}")
    (tmp_path / "bad.yaml").write_text("__use_yte__: true\na: ?1/0")


@pytest.mark.parametrize("arguments", ORDERS, ids=" ".join)
def test_every_config_file_of_the_command_line_is_looked_at(folder, arguments) -> None:
    with pytest.raises(SystemExit, match=r"^error: bad\.yaml: the key __use_yte__ is not allowed"):
        refuse_config_files(arguments)


def test_a_missing_config_file_is_one_sentence(folder) -> None:
    with pytest.raises(SystemExit, match=r"^error: .*No such file or directory: 'no\.yaml'$"):
        refuse_config_files(["--configfile", "no.yaml"])


def test_a_command_line_without_bad_config_files_passes(folder) -> None:
    refuse_config_files(["-n", "--config", "partial=true", "--cores", "1", "all"])
    refuse_config_files(["--configfile", "good.yaml", "-C", "a=bad.yaml"])
