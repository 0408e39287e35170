"""Config files are looked at before Snakemake loads, and may execute, them."""

import pytest

from dpprof.spec.config_files import refuse_config_files

ORDERS = [
    ["--configfile", "good.yaml", "bad.yaml"],
    ["--configfile=bad.yaml", "-n"],
    ["-c", "4", "--configfiles", "bad.yaml", "--config", "partial=true"],
    ["--configfile", "good.yaml", "--configfile", "bad.yaml", "--", "all"],
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text("sweeps: {}")
    (tmp_path / "bad.yaml").write_text("__use_yte__: true\na: ?1/0")


@pytest.mark.parametrize("arguments", ORDERS, ids=" ".join)
def test_every_config_file_of_the_command_line_is_looked_at(arguments) -> None:
    with pytest.raises(SystemExit, match=r"^error: bad\.yaml: the key __use_yte__ is not allowed"):
        refuse_config_files(arguments)


BAD = {
    b"sweeps:\n  one: {}\n  one: {}\n": "the key 'one' occurs twice in the mapping",
    b"sweeps: \xff\n": "is not UTF-8 text, see byte 9",
    b"a: " + b"[" * 100_000: "nests deeper than 50 levels",
}


@pytest.mark.parametrize("content", BAD, ids=["twice", "binary", "deep"])
def test_what_cannot_be_meant_is_one_sentence(tmp_path, content) -> None:
    (tmp_path / "my.yaml").write_bytes(content)

    with pytest.raises(SystemExit, match=f"^error: my.yaml: {BAD[content]}"):
        refuse_config_files(["--configfile", "my.yaml"])


def test_a_missing_config_file_is_one_sentence() -> None:
    with pytest.raises(SystemExit, match=r"^error: .*No such file or directory: 'no\.yaml'$"):
        refuse_config_files(["--configfile", "no.yaml"])


def test_a_command_line_without_bad_config_files_passes() -> None:
    refuse_config_files(["-n", "--config", "partial=true", "--cores", "1", "all"])
    refuse_config_files(["--configfile", "good.yaml", "-C", "a=bad.yaml"])
