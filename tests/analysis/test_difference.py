"""Any two of six results: three methods, recorded here and predicted for a GPU."""

import itertools
import json
from collections import Counter

import pytest
from factory import make_capacity, make_experiment, make_held, write_synthetic

from dpprof.ask.difference_text import Detail, list_rows, render_text
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.records.result import read_result, result_path
from dpprof.measure.instruments import memory
from dpprof.predict.estimate import estimate
from dpprof.results.analysis.difference.difference import explain_difference
from dpprof.results.analysis.difference.waterfall import (
    LEVELS,
    ROUNDING,
    format_size,
    list_holdings,
    name_component,
)

METHODS = ["standard", "opacus-hooks", "flash-bk"]
WAYS = {"memory": {}, "estimate": {"device": "cuda", "target": "h100"}}
RUNS = list(itertools.product(METHODS, WAYS))
PAIRS = list(itertools.permutations(RUNS, 2))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The paths of six results, by method and instrument."""
    root = tmp_path_factory.mktemp("six")
    found = {}
    for method, instrument in RUNS:
        experiment = make_experiment(method=method, noise_multiplier=0.1, **WAYS[instrument])
        run = memory.measure if instrument == "memory" else estimate
        recorded = run(experiment, lambda _: None).model_dump(exclude={"model", "samplers"})
        write_synthetic(root, experiment, instrument=instrument, recorded=recorded)
        found[method, instrument] = result_path(root, instrument, experiment.id, 0)
    return found


@pytest.fixture(scope="module")
def differences(files):
    results = {run: read_result(path) for run, path in files.items()}
    return {(a, b): explain_difference(results[a], results[b]) for a, b in PAIRS}


@pytest.fixture(scope="module")
def documents(files):
    return {run: json.loads(path.read_text())["memory"] for run, path in files.items()}


def sums_of(document, *columns) -> Counter:
    """Sum the holdings of a file by columns."""
    held = document["at_peak"]["holdings"]
    sums = Counter()
    for *key, size in zip(*(held[name] for name in columns), held["bytes"], strict=True):
        sums[tuple(key)] += size
    return sums


def test_bars_by_component_are_the_difference_of_the_peaks(differences, documents) -> None:
    assert len(differences) == 30
    for (a, b), difference in differences.items():
        peaks = [documents[run]["peak_allocated_bytes"] for run in (a, b)]
        assert difference.difference_bytes == peaks[0] - peaks[1]
        assert sum(bar.difference_bytes for bar in difference.bars) == peaks[0] - peaks[1]
        for bar in difference.bars:
            if bar.name == ROUNDING:
                rounding = [documents[run]["attribution"]["rounding_bytes"] for run in (a, b)]
                assert [bar.a_bytes, bar.b_bytes] == rounding
            else:
                owned = [documents[run]["at_peak"]["components"][bar.name] for run in (a, b)]
                assert [bar.a_bytes, bar.b_bytes] == owned


def test_bars_by_layer_and_operator_are_those_of_the_files(differences, documents) -> None:
    for (a, b), difference in differences.items():
        layers = [sums_of(documents[run], "component", "layer") for run in (a, b)]
        ops = [sums_of(documents[run], "component", "layer", "op", "phase") for run in (a, b)]
        seen = 0
        for bar in difference.bars:
            if bar.name == ROUNDING:
                continue
            assert sum(layer.difference_bytes for layer in bar.bars) == bar.difference_bytes
            for layer in bar.bars:
                key = bar.name, layer.name
                assert [layer.a_bytes, layer.b_bytes] == [side[key] for side in layers]
                sizes = [op.difference_bytes for op in layer.bars]
                assert sum(sizes) == layer.difference_bytes
                for op in layer.bars:
                    name, _, phase = op.name.removesuffix(")").rpartition(" (")
                    found = [side[*key, name, phase] for side in ops]
                    assert [op.a_bytes, op.b_bytes] == found
                    seen += 1
        assert seen == len(ops[0] | ops[1])


def parts_of(rows, at):
    """The lines one level within a line."""
    depth = rows[at].depth
    inside = itertools.takewhile(lambda one: one.depth > depth, rows[at + 1 :])
    return [one for one in inside if one.depth == depth + 1]


@pytest.mark.parametrize("every_layer", [False, True])
@pytest.mark.parametrize("top", [1, 3])
@pytest.mark.parametrize("depth", LEVELS)
def test_lines_sum_exactly_at_every_depth(differences, depth, top, every_layer) -> None:
    for difference in differences.values():
        rows = list_rows(difference, Detail(depth, top, every_layer))
        outer = [row for row in rows if row.depth == 0]
        assert sum(row.difference_bytes for row in outer) == difference.difference_bytes
        for at, row in enumerate(rows):
            parts = parts_of(rows, at)
            if row.depth == list(LEVELS).index(depth) or " other " in row.name:
                assert parts == []
                continue
            assert 1 <= len(parts) <= (top + 1)
            # Each begins where the one before it ends, and together they are the line.
            ends = [one.start + one.difference_bytes for one in parts]
            assert [one.start for one in parts] == [row.start, *ends[:-1]]
            assert ends[-1] == row.start + row.difference_bytes


def test_printed_bytes_add_up(differences) -> None:
    """Read back what a person reads: peak, signed bars by component, peak."""
    for difference in differences.values():
        text = render_text(difference, Detail("component")).split("\n\n")[1]
        first, *bars, last = (int(line.split()[0].replace(",", "")) for line in text.splitlines())
        assert first + sum(bars) == last
        assert last - first == difference.difference_bytes


def test_timelines_of_a_pair_are_those_of_the_files(differences, documents) -> None:
    for (a, b), difference in differences.items():
        for run, curve in ((a, difference.axis.a), (b, difference.axis.b)):
            columns = documents[run]["timeline"]["components"].values()
            assert curve.total_bytes == [sum(sizes) for sizes in zip(*columns, strict=True)]
            assert max(curve.total_bytes) == documents[run]["attribution"]["timeline_peak_bytes"]
            assert curve.at == sorted(curve.at)
            assert curve.at[-1] == pytest.approx(1)


def written(root, sizes=None, instrument="memory", capacity=None, replicate=0, **fields):
    recorded = make_held(sizes or {"parameters": 8})
    if capacity is not None:
        recorded |= make_capacity(**capacity)
    experiment = make_experiment(**fields)
    known = {"instrument": instrument, "replicate": replicate}
    return write_synthetic(root, experiment, recorded=recorded, **known)


def test_what_the_allocators_blocks_take_beyond_is_a_row_of_its_own(tmp_path) -> None:
    """On CUDA peaks count whole blocks, and holdings the timeline's sizes."""
    told = make_held({"parameters": 512, "noise": 1024})
    told["memory"]["peak_allocated_bytes"] = 2048
    told["memory"]["attribution"]["rounding_bytes"] = 512
    experiment = make_experiment(device="cuda", target="h200")
    rows = list_holdings(
        write_synthetic(tmp_path, experiment, instrument="estimate", recorded=told)
    )

    assert json.loads(json.dumps(rows)) == rows
    assert [(row["component"], row["layer"], row["bytes"]) for row in rows] == [
        ("parameters", "head", 512),
        ("noise", "head", 1024),
        (ROUNDING, None, 512),
    ]


NAMES = {
    "methods": ({"method": "flash"}, {"method": "standard"}, "flash", "standard"),
    "batches": (
        {"batch_size": 2048},
        {"batch_size": 16},
        "standard (batch size 2,048)",
        "standard (batch size 16)",
    ),
    "models and methods": (
        {"model": "tiny"},
        {"model": "1b", "method": "flash"},
        "standard (model tiny)",
        "flash (model 1b)",
    ),
    "a target says which device": (
        {"device": "cuda", "target": "h200"},
        {},
        "standard (target h200)",
        "standard (device cpu)",
    ),
    "what does not tell peaks apart": (
        {"method": "flash", "seed": 3},
        {"timed_steps": 4},
        "flash",
        "standard",
    ),
    "replicates": (
        {},
        {"replicate": 1},
        "standard (predicted, replicate 0)",
        "standard (predicted, replicate 1)",
    ),
    "twice the same": ({}, {}, "standard (A)", "standard (B)"),
    "a capacity is of the batch that it states": (
        {"instrument": "capacity", "capacity": {"stated_batch_size": 8}},
        {"batch_size": 8, "method": "flash"},
        "standard",
        "flash",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_runs_are_named_by_what_tells_them_apart(case, tmp_path) -> None:
    a, b, of_a, of_b = NAMES[case]
    difference = explain_difference(written(tmp_path, **a), written(tmp_path, **b))

    assert (difference.a.name, difference.b.name) == (of_a, of_b)


def test_what_both_share_is_told(tmp_path) -> None:
    a, b = written(tmp_path), written(tmp_path, batch_size=3, dtype="bfloat16")

    assert explain_difference(a, b).shared == (
        "method standard",
        "model V16-d8-L1-H2",
        "seq len 4",
        "device cpu",
    )


def test_a_result_that_cannot_be_explained_says_what_to_run(tmp_path) -> None:
    experiment = make_experiment()
    failed = write_synthetic(tmp_path, experiment, instrument="memory", outcome="oom")
    with pytest.raises(InputError, match=r"^the run ended as oom, .* unknown: it broke$"):
        list_holdings(failed)
    clean = write_synthetic(tmp_path, experiment)
    with pytest.raises(InputError, match=r"clean does not record .* memory, estimate, capacity$"):
        list_holdings(clean)


def test_sizes_and_components_are_said_in_words() -> None:
    assert [format_size(size) for size in (0, 1023, 1024, -1536, 540 * 2**20, 3 * 2**30)] == [
        "0 bytes",
        "1,023 bytes",
        "1.0 KiB",
        "-1.5 KiB",
        "540.0 MiB",
        "3.0 GiB",
    ]
    assert name_component("per_sample_gradients") == "per-sample gradients"
    assert name_component("optimizer_state") == "optimizer state"
