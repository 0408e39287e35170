"""A plane through the nearest places; which these are does not hang on a processor's rounding."""

import itertools
import json
import math
import sys

import numpy as np
import pytest
from fresh_process import run_fresh
from same_numbers import assert_same

from dpprof.predict.step_time.plane import fit_plane, log2
from dpprof.predict.step_time.product_table import ProductTable, read_document


def pick(points, values, neighbours: int, apart=None) -> float:
    points = np.array(points, dtype=float)
    apart = np.zeros(len(points)) if apart is None else np.array(apart)
    return fit_plane(points, np.array(values), np.zeros(points.shape[1]), apart, neighbours)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1023, 1025, 50_257, 128_256, 10**9 + 7, 2**40 - 1])
def test_a_logarithm_is_right_to_six_decimals(size) -> None:
    assert log2(size) == pytest.approx(math.log2(size), abs=1e-6)


def test_the_logarithm_of_a_power_of_two_is_its_exponent() -> None:
    assert [log2(2**power) for power in range(60)] == list(range(60))


def test_a_larger_size_never_has_a_smaller_logarithm() -> None:
    found = [log2(size) for size in range(1, 20_000)]

    assert found == sorted(found)


def test_a_linear_law_is_found_again() -> None:
    grid = [(a, b) for a in range(-2, 3) for b in range(-2, 3) if (a, b) != (0, 0)]

    found = pick(grid, [3.0 + 0.5 * a - 0.25 * b for a, b in grid], 8)

    assert found == pytest.approx(3.0, abs=1e-12)


def test_places_as_far_away_as_the_last_one_all_count() -> None:
    corners = [(1, 0), (-1, 0), (0, 1), (0, -1)]
    for each in range(4):  # whichever place comes first
        order = [*corners[each:], *corners[:each]]
        values = [{(1, 0): 8.0}.get(place, 4.0) for place in order]
        assert pick(order, values, 3) == pytest.approx(5.0)


def test_a_place_further_away_does_not_count() -> None:
    assert pick([(1, 0), (-1, 0), (0, 3)], [1.0, 1.0, 99.0], 2) == pytest.approx(1.0)
    assert pick([(1,), (-1,), (1,)], [1.0, 1.0, 99.0], 3, [0.0, 0.0, np.inf]) == pytest.approx(1.0)


def shake(function, by: int):
    """Return a function whose results are off by a last bit, which one depends on the argument."""

    def shaken(x):
        right = function(x)
        towards = np.array([-np.inf, 0.0, np.inf])
        which = (np.asarray(x, dtype=float).view(np.int64) * by >> 7) % 3
        return np.where(which == 1, right, np.nextafter(right, towards[which]))

    return shaken


@pytest.mark.parametrize("name", ["h100", "a100"])
def test_last_bits_of_logarithms_decide_nothing(name, monkeypatch) -> None:
    sides = (96, 640, 4096, 14336)
    shapes = list(itertools.product(sides, repeat=3))
    document = read_document(name)
    expected = list(itertools.starmap(ProductTable(document).find, shapes))
    for module, function in ((np, "log2"), (np, "log"), (math, "log2"), (math, "log")):
        monkeypatch.setattr(module, function, shake(getattr(module, function), 2654435761))

    found = list(itertools.starmap(ProductTable(document).find, shapes))

    assert [one[1:] for one in found] == [one[1:] for one in expected]
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], rel=1e-9)


ASKED = """
import json, sys
import numpy as np
from factory import make_experiment
from dpprof.experiments.config import registry
estimate = registry.load("instruments", "estimate")
told = estimate(make_experiment(**json.loads(sys.argv[1])), lambda _: None).model_dump(mode="json")
print(json.dumps([told["memory"], told["compute"], told["time"]["predicted_step_s"]]))
print(json.dumps(np.show_config(mode="dicts")["SIMD Extensions"]["found"]))
"""
ASKED_ABOUT = [
    {"model": "tiny", "method": "flash-bk", "batch_size": 4, "seq_len": 96},
    {"model": "small", "method": "flash-bk", "batch_size": 4, "seq_len": 96},
    {"model": "resnet20-gn", "method": "opacus-ghost", "seq_len": 1},
    {"model": "medium", "method": "flash", "seq_len": 320, "target": "b200"},
]


@pytest.mark.parametrize(
    "asked",
    [ASKED_ABOUT[0], *(pytest.param(one, marks=pytest.mark.slow) for one in ASKED_ABOUT[1:])],
    ids=lambda asked: asked["model"],
)
def test_a_processor_without_avx_512_predicts_the_same(asked, monkeypatch, capsys) -> None:
    extensions = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    wide = [one for one in extensions if one == "X86_V4" or one.startswith("AVX512")]
    if not wide:
        pytest.skip("this processor has no AVX-512, so that every other test runs without")
    given = json.dumps({"target": "h100", "device": "cuda", "dtype": "bfloat16"} | asked)
    monkeypatch.setattr(sys, "argv", ["", given])
    exec(ASKED, {})  # noqa: S102
    here, _ = map(json.loads, capsys.readouterr().out.splitlines())
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", " ".join(wide))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")

    there, narrower = map(json.loads, run_fresh(ASKED, given).splitlines())

    assert not set(wide).intersection(narrower)
    assert_same(there, here)
