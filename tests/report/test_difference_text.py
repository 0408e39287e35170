"""What is said of a difference, word by word, and that names stay text."""

import pytest
from differences import make_difference
from snapshots import assert_reviewed, assert_sentences

from dpprof.ask.difference_text import Detail, render_text, say

MIB = 2**20
WEIGHTS = ("parameters", "head", "empty", 100 * MIB)
SAMPLES = [
    ("per_sample_gradients", "head", "bmm", 260 * MIB),
    ("per_sample_gradients", "embedding", "bmm", 220 * MIB),
    ("per_sample_gradients", "norm", "mul", 60 * MIB),
]
NAMED = [("inputs", name, "clone", MIB) for name in "abcdefgh"]
OUTSIDE = [("inputs", name, "clone", size) for name, size in ((None, 20), ("a", 30), ("b", 11))]
BLOCKS = [("saved_activations", f"blocks.{n}.mlp", "mm", 10 * MIB) for n in range(24)]
GRADIENTS = "gradients", "head", "mm"
PAIRS = {
    "most of it, and a second component": (
        [WEIGHTS, *SAMPLES, (*GRADIENTS, 150 * MIB)],
        [WEIGHTS],
    ),
    "a second component that is too small to tell": (
        [WEIGHTS, *SAMPLES, (*GRADIENTS, 100 * MIB)],
        [WEIGHTS],
    ),
    "more than all of it": (
        [WEIGHTS, *SAMPLES],
        [WEIGHTS, ("workspace", None, "mm", 40 * MIB)],
    ),
    "less": ([WEIGHTS], [WEIGHTS, ("noise", None, "normal", 3 * 2**30)]),
    "less, and more of another": (
        [WEIGHTS, ("noise", "head", "normal", 5)],
        [WEIGHTS, (*GRADIENTS, 9)],
    ),
    "blocks alike": (BLOCKS, []),
    "many layers": (NAMED, []),
    "in a layer and outside": (OUTSIDE, []),
    "nothing": ([WEIGHTS], [WEIGHTS]),
    "as much in other places": ([("noise", "a", "normal", 8)], [("noise", "b", "normal", 8)]),
}


def test_a_sentence_says_what_explains_most() -> None:
    assert_sentences("report/differences", lambda name: say(make_difference(*PAIRS[name])), PAIRS)


A = [WEIGHTS, *SAMPLES, ("noise", None, "normal", 10 * MIB)]
B = [WEIGHTS, ("gradients", "head", "mm", 50 * MIB)]


BLOCKS = [("noise", f"blocks.{n}.mlp", "normal", 1 + n) for n in range(3)]
DEEPER = (
    [("noise", "head", "normal", 8), ("inputs", "x", "clone", 1)],
    [("noise", "head", "zeros", 8)],
)
TEXTS = {
    "difference": (A, B, Detail("layer", 1)),
    "two layers and one beyond": (A, B, Detail("layer", 2)),
    "blocks together": (BLOCKS, [], Detail()),
    "blocks, each": (BLOCKS, [], Detail(every_layer=True)),
    "no difference of layers": (*DEEPER, Detail("layer")),
    "a difference of operators": (*DEEPER, Detail("operator")),
    "no difference": ([WEIGHTS], [WEIGHTS], Detail()),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_leads_from_one_peak_to_the_other(name) -> None:
    """Of "difference", a column of the bars is a 24th of what lies between 150 and 690 MiB."""
    a, b, detail = TEXTS[name]
    difference = make_difference(a, b, names=("flash", "plain"))

    assert_reviewed(f"report/{name}", render_text(difference, detail) + "\n")


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
