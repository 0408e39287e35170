import pytest

from dpprof.storage import canonical_json, sha256_hex, write_atomically, write_if_changed


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
