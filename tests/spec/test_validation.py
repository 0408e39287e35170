"""Messages: short, printable, and about the key, the value and what is allowed."""

import pytest
from pydantic import BaseModel
from snapshots import assert_sentences

from dpprof.experiments.config.validation import InputError, read_model, refuse
from dpprof.experiments.planning.planner import make_plan
from dpprof.system.console import printable

SWEEP = {"model": "tiny", "method": "standard", "batch_size": 1, "seq_len": 4}


def refusal_of(**keys) -> str:
    with pytest.raises(InputError) as caught:
        make_plan({"sweeps": {"s": SWEEP | keys}}, device=lambda: "cpu")
    return str(caught.value)


def test_of_many_bad_values_ten_are_told_and_the_rest_is_counted() -> None:
    lines = refusal_of(batch_size=list(range(-4406, 1))).splitlines()

    assert len(lines) == 11
    assert lines[0] == (
        "sweeps.s.batch_size: -4406 is not allowed; it must be greater than or equal to 1"
    )
    assert lines[-1] == "and 4,397 more"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"batch_size": 16**5000}, "sweeps.s.batch_size: a number of 6,021 digits is not allowed"),
        ({"seq_len": "9" * 5000}, "sweeps.s.seq_len: '9999"),
        ({"k" * 10**6: 1}, "unknown key 'kkkk"),
        ({"model": {"k" * 10**6: 1}}, "unknown key 'kkkk"),
    ],
)
def test_a_value_of_any_length_makes_a_short_sentence(keys, sentence: str) -> None:
    first = refusal_of(**keys).splitlines()[0]

    assert first.startswith(sentence)
    assert len(first.partition("; allowed: ")[0]) < 200  # what names there are is not the value's


ESCAPES = [
    {"model": "\x1b[2J"},
    {"\x1b[2J": 1},
    {"target": {"\x1b[2J": 1}},
    {"target": {"memory_bytes": 1, "flops_per_s": {"\x1b[2J": 1}, "bandwidth_bytes_per_s": 1}},
    {"model": "\x9b2J\u202e"},
]


@pytest.mark.parametrize("keys", ESCAPES, ids=ascii)
def test_codes_for_a_terminal_are_escaped(keys) -> None:
    sentence = refusal_of(**keys)

    assert all(letter.isprintable() or letter == "\n" for letter in sentence)
    assert "\\x" in sentence


def test_printable_text_is_left_as_it_is() -> None:
    assert printable("größe: 4 µs\n") == "größe: 4 µs\n"
    assert printable("a\x1b[2J\tb\u202e\ud800") == "a\\x1b[2J\\tb\\u202e\\ud800"


def test_a_number_is_spelled_out_while_it_is_short() -> None:
    assert str(refuse("k", -(10**38), "no")) == f"k: {-(10**38)} is not allowed; no"
    assert str(refuse("k", 10**40, "no")) == "k: a number of 41 digits is not allowed; no"


@pytest.mark.parametrize("name", ["names", "targets"])
def test_names_and_targets_that_cannot_be_meant_are_one_sentence(name) -> None:
    """Of names the nearest that exists is told."""
    assert_sentences(f"spec/{name}", lambda keys: refusal_of(**keys))


class Part(BaseModel):
    key: int


@pytest.mark.parametrize(
    "content",
    [b'{"key": 1', b"{}", bytes(range(256)), b"[" * 100_000, b'{"key": ' + b"1" * 10_000 + b"}"],
    ids=["cut", "incomplete", "binary", "deep", "digits"],
)
def test_a_file_that_is_no_part_is_named_in_one_sentence(tmp_path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)

    with pytest.raises(InputError, match=r"^[^\n]*x\.json: is not a part \([^\n]*\)$"):
        read_model(tmp_path / "x.json", Part, "a part")
