"""What is said of a difference, word by word, and that names stay text."""

import pytest
from differences import make_difference

from dpprof.ask.explain.show import Detail, list_rows, render_text, say

MIB = 2**20
WEIGHTS = ("parameters", "head", "empty", 100 * MIB)
SAMPLES = [
    ("per_sample_gradients", "head", "bmm", 260 * MIB),
    ("per_sample_gradients", "embedding", "bmm", 220 * MIB),
    ("per_sample_gradients", "norm", "mul", 60 * MIB),
]
SENTENCES = {
    "most of it, and a second component": (
        [WEIGHTS, *SAMPLES, ("gradients", "head", "mm", 150 * MIB)],
        [WEIGHTS],
        (
            "flash needs 690.0 MiB more than standard: 540.0 MiB of it are per-sample gradients, "
            "mostly in head and embedding, and 150.0 MiB are gradients."
        ),
    ),
    "a second component that is too small to tell": (
        [WEIGHTS, *SAMPLES, ("gradients", "head", "mm", 100 * MIB)],
        [WEIGHTS],
        (
            "flash needs 640.0 MiB more than standard: 540.0 MiB of it are per-sample gradients, "
            "mostly in head and embedding."
        ),
    ),
    "more than all of it": (
        [WEIGHTS, *SAMPLES],
        [WEIGHTS, ("workspace", None, "mm", 40 * MIB)],
        (
            "flash needs 500.0 MiB more than standard: it holds 540.0 MiB more of per-sample "
            "gradients, mostly in head and embedding, and 40.0 MiB less of workspace."
        ),
    ),
    "less": (
        [WEIGHTS],
        [WEIGHTS, ("noise", None, "normal", 3 * 2**30)],
        "flash needs 3.0 GiB less than standard: 3.0 GiB of it is noise, outside the model.",
    ),
    "less, and more of another": (
        [WEIGHTS, ("noise", "head", "normal", 5)],
        [WEIGHTS, ("gradients", "head", "mm", 9)],
        (
            "flash needs 4 bytes less than standard: it holds 9 bytes less of gradients, in head, "
            "and 5 bytes more of noise."
        ),
    ),
    "blocks alike": (
        [("saved_activations", f"blocks.{n}.mlp", "mm", 10 * MIB) for n in range(24)],
        [],
        (
            "flash needs 240.0 MiB more than standard: 240.0 MiB of it are saved activations, in "
            "blocks.*.mlp (24 layers)."
        ),
    ),
    "many layers": (
        [("inputs", name, "clone", MIB) for name in "abcdefgh"],
        [],
        "flash needs 8.0 MiB more than standard: 8.0 MiB of it are inputs, spread over 8 layers.",
    ),
    "in a layer and outside": (
        [("inputs", name, "clone", size) for name, size in ((None, 20), ("a", 30), ("b", 11))],
        [],
        (
            "flash needs 61 bytes more than standard: 61 bytes of it are inputs, mostly in a and "
            "outside the model."
        ),
    ),
    "nothing": ([WEIGHTS], [WEIGHTS], "flash and standard need the same: 100.0 MiB."),
    "as much in other places": (
        [("noise", "a", "normal", 8)],
        [("noise", "b", "normal", 8)],
        "flash and standard need the same: 8 bytes, held in other places.",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_a_sentence_says_what_explains_most(case) -> None:
    a, b, sentence = SENTENCES[case]

    assert say(make_difference(a, b)) == sentence


A = [WEIGHTS, *SAMPLES, ("noise", None, "normal", 10 * MIB)]
B = [WEIGHTS, ("gradients", "head", "mm", 50 * MIB)]


TABLE = """\
 157,286,400   150.0 MiB                            B: plain, recorded, in backward, at mm of head
+566,231,040  +540.0 MiB  ████████████████████████  per-sample gradients
+272,629,760  +260.0 MiB  ███████████                 head
+293,601,280  +280.0 MiB             █████████████    2 other layers
 -52,428,800   -50.0 MiB                       ░░░  gradients
 -52,428,800   -50.0 MiB                       ░░░    head
 +10,485,760   +10.0 MiB                       █    noise
 +10,485,760   +10.0 MiB                       █      outside the model
 681,574,400   650.0 MiB                            A: flash, recorded, in backward, at mm of head
"""
"""A column of the bars is a 24th of what lies between 150 and 690 MiB."""


def test_text_leads_from_one_peak_to_the_other() -> None:
    difference = make_difference(A, B, names=("flash", "plain"))
    sentence, shared, _, *table = render_text(difference, Detail("layer", 1)).splitlines()

    assert sentence == say(difference)
    assert shared == "Both: model tiny."
    assert table == [*TABLE.splitlines(), "", "Equal in both: parameters (100.0 MiB)."]


def test_a_single_layer_beyond_the_top_has_its_own_line() -> None:
    names = [row.name for row in list_rows(make_difference(A, B), Detail("layer", 2))]

    assert names[:4] == ["per-sample gradients", "head", "embedding", "norm"]


def test_blocks_have_a_line_together_or_each_their_own() -> None:
    held = [("noise", f"blocks.{n}.mlp", "normal", 1 + n) for n in range(3)]
    difference = make_difference(held, [])
    together = list_rows(difference, Detail())
    each = list_rows(difference, Detail(every_layer=True))

    assert [(row.name, row.a_bytes) for row in together[1:]] == [("blocks.*.mlp (3 layers)", 6)]
    assert [row.name for row in each[1:]] == ["blocks.2.mlp", "blocks.1.mlp", "blocks.0.mlp"]


def test_what_differs_only_deeper_has_no_line() -> None:
    a = [("noise", "head", "normal", 8), ("inputs", "x", "clone", 1)]
    difference = make_difference(a, [("noise", "head", "zeros", 8)])

    assert [row.name for row in list_rows(difference, Detail("layer"))] == ["inputs", "x"]
    assert "Equal in both: noise (8 bytes)." in render_text(difference, Detail("layer"))
    assert [row.name for row in list_rows(difference, Detail("operator"))][3:] == [
        "noise",
        "head",
        "normal (backward)",
        "zeros (backward)",
    ]


def test_equal_runs_have_peaks_and_no_bars() -> None:
    text = render_text(make_difference([WEIGHTS], [WEIGHTS]), Detail())

    assert text.count("104,857,600") == 2
    assert "█" not in text


@pytest.mark.parametrize(
    "name", ["x\n| **peak** | 1 |", "\x1b[31mred\x07", "\u202eright to left", "a\rb"]
)
def test_hostile_names_stay_on_their_line(name) -> None:
    difference, plain = (
        make_difference(
            [("noise", text, text, 2 * MIB)], [("noise", "b", "normal", MIB)], shared=(text,)
        )
        for text in (name, "a")
    )
    said, harmless = (render_text(one, Detail("operator")) for one in (difference, plain))

    assert len(said.splitlines()) == len(harmless.splitlines())
    assert all(letter.isprintable() for line in said.splitlines() for letter in line)
