"""Every number in the findings, recomputed straight from the JSON files by other code."""

import itertools
import json
import re
import statistics

import numpy as np
import pandas as pd
import pytest
from factory import make_experiment, make_manifest, write_synthetic

from dpprof.analysis.collection import collect
from dpprof.analysis.tables import build_tables
from dpprof.report.sentences import MAX_SETTINGS, tell_findings

METHODS = ("standard", "microbatch", "opacus-ghost", "opacus-hooks")


@pytest.fixture
def sweep(tmp_path):
    """Four methods at two batch sizes, three processes each, with times drawn at random."""
    draw = np.random.default_rng(3)
    runs = []
    for batch, (rank, method) in itertools.product((2, 5), enumerate(METHODS)):
        experiment = make_experiment(method=method, batch_size=batch)
        for number in range(3):
            steps = tuple(draw.normal(0.1 * batch * (1 + rank), 0.002, 5))
            peak = int(2**20 * batch * (9 - rank))
            write_synthetic(
                tmp_path, experiment, replicate=number, step_s=steps, peak_allocated_bytes=peak
            )
            runs.append((experiment, number))
    return tmp_path, build_tables(collect(make_manifest(*runs), tmp_path, partial=False))


def recompute(root) -> dict[int, dict[str, tuple[float, float]]]:
    """By batch size and method: the median step in ms, the peak in MiB."""
    times, peaks = {}, {}
    for path in (root / "results" / "clean").glob("*.json"):
        document = json.loads(path.read_text())
        key = (document["experiment"]["batch_size"], document["experiment"]["method"])
        times.setdefault(key, []).append(statistics.median(document["time"]["step_s"]) * 1000)
        peaks.setdefault(key, []).append(document["memory"]["peak_allocated_bytes"] / 1048576)
    found = {}
    for batch, method in times:
        middle = sorted(times[batch, method])[1], sorted(peaks[batch, method])[1]
        found.setdefault(batch, {})[method] = middle
    return found


def sentences(tables) -> list[str]:
    (bullets,) = tell_findings(tables["settings"], tables["methods"])
    return list(bullets.items)


def test_numbers_are_those_of_the_files(sweep) -> None:
    root, tables = sweep
    expected = recompute(root)
    said = {int(re.search(r"B = (\d+)", text)[1]): text for text in sentences(tables)}

    assert set(said) == set(expected) == {2, 5}
    for batch, by_method in expected.items():
        base_ms, base_mib = by_method.pop("standard")
        smallest = min(by_method, key=lambda name: by_method[name][1])
        fastest = min(by_method, key=lambda name: by_method[name][0])
        fastest_ms, smallest_mib = by_method[fastest][0], by_method[smallest][1]
        assert (
            f"{smallest} has the lowest peak, {smallest_mib:.1f} MiB allocated "
            f"({smallest_mib / base_mib:.2f} times standard)" in said[batch]
        )
        assert (
            f"{fastest} is fastest, at {fastest_ms:.1f} ms per step "
            f"({fastest_ms / base_ms:.2f} times standard, 95 % interval " in said[batch]
        )
        low, high = map(float, re.search(r"interval ([\d.]+) to ([\d.]+)", said[batch]).groups())
        assert low <= fastest_ms / base_ms <= high
        assert "of 3 private methods" in said[batch]


def test_the_interval_of_three_processes_is_the_range_of_ratios(sweep) -> None:
    root, tables = sweep
    steps = {}
    for path in (root / "results" / "clean").glob("*.json"):
        document = json.loads(path.read_text())
        if document["experiment"]["batch_size"] == 2:
            median = statistics.median(document["time"]["step_s"])
            steps.setdefault(document["experiment"]["method"], []).append(median)
    low = min(steps["microbatch"]) / max(steps["standard"])
    high = max(steps["microbatch"]) / min(steps["standard"])

    text = next(text for text in sentences(tables) if "B = 2" in text)
    assert f"95 % interval {low:.2f} to {high:.2f}" in text


def row(**changes) -> pd.DataFrame:
    usual = {
        "model": "tiny",
        "seq_len": 8,
        "batch_size": 2,
        "parameters_total": 10,
        "methods": 2,
        "smallest": "opacus-ghost",
        "peak_kind": "allocated",
        "smallest_peak_bytes": 2**20,
        "smallest_ratio": 1.5,
        "fastest": "opacus-hooks",
        "fastest_step_s": 0.01,
        "fastest_ratio": 2.0,
        "fastest_ratio_low": 1.9,
        "fastest_ratio_high": 2.1,
        "fastest_verdict": "larger",
        "not_slower": None,
        "noise_known": True,
    }
    return pd.DataFrame([usual | changes])


def tell(settings: pd.DataFrame) -> str:
    return tell_findings(settings, pd.DataFrame())[0].items[0]


def test_a_whole_sentence() -> None:
    assert tell(row(not_slower="a b c")) == (
        "tiny, T = 8, B = 2: of 2 private methods, opacus-ghost has the lowest peak, 1.0 MiB "
        "allocated (1.50 times standard); opacus-hooks is fastest, at 10.0 ms per step (2.00 times "
        "standard, 95 % interval 1.90 to 2.10), with no detectable difference from a, b and c."
    )


def test_no_difference_from_standard_is_said() -> None:
    text = tell(row(fastest_verdict="no difference detected"))

    assert "10.0 ms per step (no difference from standard detected)." in text


def test_unknown_noise_is_said() -> None:
    assert "but without replicates the noise is unknown." in tell(
        row(noise_known=False, fastest_ratio_low=None, fastest_ratio_high=None)
    )


@pytest.mark.parametrize("changes", [{"smallest": None}, {"fastest": None}])
def test_what_is_unknown_is_left_out(changes) -> None:
    text = tell(row(**changes))

    assert ("has the lowest peak" in text) == ("smallest" not in changes)
    assert ("is fastest" in text) == ("fastest" not in changes)
    assert "nan" not in text.lower()


def test_no_standard_no_ratio() -> None:
    text = tell(row(smallest_ratio=None, fastest_ratio=None, fastest_verdict=None))

    assert "times standard" not in text
    assert "nan" not in text.lower()


def test_many_settings_are_counted_and_not_listed() -> None:
    settings = pd.concat([row(seq_len=n) for n in range(MAX_SETTINGS + 1)])
    settings.iloc[0, settings.columns.get_loc("smallest")] = "microbatch"
    methods = pd.DataFrame(
        {
            "method": ["standard", "opacus-ghost"],
            **{
                f"{ratio}_{name}": [1.0, value]
                for ratio in ("step_ratio", "peak_ratio")
                for name, value in (("count", 9), ("median", 2.5), ("min", 1.5), ("max", 4.0))
            },
        }
    )
    (bullets,) = tell_findings(settings, methods)

    assert bullets.items == (
        (
            "The private method with the lowest peak, over 9 settings: opacus-ghost in 8, "
            "microbatch in 1."
        ),
        "The private method that is fastest, over 9 settings: opacus-hooks in 9.",
        (
            "Ratio to standard's peak memory, median over settings (range): "
            "opacus-ghost 2.50 (1.50 to 4.00)."
        ),
        (
            "Ratio to standard's step time, median over settings (range): "
            "opacus-ghost 2.50 (1.50 to 4.00)."
        ),
    )


def test_nothing_to_compare_is_said() -> None:
    (block,) = tell_findings(row().head(0), pd.DataFrame())

    assert block.text == "No private method succeeded, so there is nothing to compare."
