"""Every number in the findings, recomputed straight from the JSON files by other code."""

import itertools
import json
import statistics

import numpy as np
import pandas as pd
import pytest
from factory import make_experiment, make_manifest, write_synthetic

from dpprof.analysis.collection import collect
from dpprof.analysis.tables.build import build_tables
from dpprof.report.sentences import MAX_SENTENCES, tell_findings

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
    [said] = sentences(tables)

    # Of every batch the same two methods win, so that both are in one sentence.
    assert set(expected) == {2, 5}
    base = {batch: by_method.pop("standard") for batch, by_method in expected.items()}
    fastest = {b: min(ms.values()) for b, ms in by_step(expected, 0).items()}
    smallest = {b: min(mib.values()) for b, mib in by_step(expected, 1).items()}
    times = sorted(fastest[b] / base[b][0] for b in base)
    peaks = sorted(smallest[b] / base[b][1] for b in base)
    assert said == (
        "For V16-d8-L1-H2 at T = 4 and B = 2 and 5: opacus-hooks has the lowest peak of the "
        f"private methods, {smallest[2]:.1f} to {smallest[5]:.1f} MiB allocated "
        f"({peaks[0]:.2f} times standard); microbatch is fastest, at {fastest[2]:.1f} to "
        f"{fastest[5]:.1f} ms per step ({times[0]:.2f} to {times[1]:.2f} times standard)."
    )


def by_step(expected, place):
    return {
        batch: {name: values[place] for name, values in by_method.items()}
        for batch, by_method in expected.items()
    }


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

    only = tables["settings"][tables["settings"]["batch_size"] == 2]
    [text] = sentences(tables | {"settings": only})
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
        "For tiny at T = 8 and B = 2: opacus-ghost has the lowest peak of the private methods, 1.0 "
        "MiB allocated (1.50 times standard); opacus-hooks is fastest, at 10.0 ms per step (2.00 "
        "times standard, 95 % interval 1.90 to 2.10), with no detectable difference from a, b and "
        "c."
    )


def test_settings_that_say_the_same_become_one_sentence() -> None:
    lengths = [row(seq_len=n, smallest_peak_bytes=n * 2**20) for n in (64, 128, 256)]
    other = row(seq_len=512, fastest="opacus-ghost")
    said = tell_findings(pd.concat([*lengths, other]), pd.DataFrame())[0].items

    assert len(said) == 2
    assert said[0].startswith("For tiny at T = 512 and B = 2: ")
    assert said[1].startswith("For tiny at T = 64 to 256 and B = 2: ")
    assert "64.0 to 256.0 MiB allocated (1.50 times standard)" in said[1]


def test_settings_that_are_no_grid_are_counted() -> None:
    pairs = pd.concat([row(seq_len=64, batch_size=2), row(seq_len=128, batch_size=4)])

    assert tell(pairs).startswith("For tiny at T = 64 and 128 and B = 2 and 4 (2 settings): ")


def test_where_some_of_several_differ_from_standard_the_others_are_counted() -> None:
    some = pd.concat([row(), row(seq_len=16, fastest_verdict="no difference detected")])

    assert "(2.00 times standard, in 1 no difference detected)" in tell(some)


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
    settings = pd.concat([row(model=f"m{n}") for n in range(MAX_SENTENCES + 1)])
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
