import pytest
from factory import make_experiment, make_memory, tables_of_runs

from dpprof.figures import predicted
from dpprof.figures.style import NothingToDrawError
from dpprof.spec.datasheets import L4

GIB = 2**30


def estimate(method="standard", size=4 * GIB, **fields):
    on = {"device": "cuda", "target": "l4"}
    recorded = make_memory({"parameters": size, "noise": size})
    return make_experiment(**{"method": method, **on, **fields}), "estimate", {"recorded": recorded}


def test_bars_are_the_owners_in_gib_beside_the_targets_memory(tmp_path) -> None:
    tables = tables_of_runs(tmp_path, estimate(), estimate("opacus-hooks", size=16 * GIB))
    (axis,) = predicted.draw(tables).axes
    widths = {
        container.get_label(): [bar.get_width() for bar in container]
        for container in axis.containers
    }

    assert widths == {"parameters": [4, 16], "noise": [4, 16]}
    assert [text.get_text() for text in axis.texts] == ["1.00x", "4.00x"]
    (line,) = axis.lines
    assert line.get_xdata()[0] == L4.memory_bytes / GIB
    assert axis.get_title().endswith("T = 4, B = 2 on l4")


def test_the_line_is_seen_however_far_it_is(tmp_path) -> None:
    (axis,) = predicted.draw(tables_of_runs(tmp_path, estimate(size=2**20))).axes

    assert axis.get_xlim()[1] > L4.memory_bytes / GIB


def test_every_batch_length_and_target_has_a_panel(tmp_path) -> None:
    runs = [estimate(batch_size=b, seq_len=t) for b in (2, 4) for t in (8, 16)]
    figure = predicted.draw(tables_of_runs(tmp_path, *runs, estimate(target="h200")))

    assert {axis.get_title().partition(", ")[2] for axis in figure.axes if axis.axison} == {
        "T = 4, B = 2 on h200",
        *(f"T = {t}, B = {b} on l4" for b in (2, 4) for t in (8, 16)),
    }


def test_this_machine_is_a_target_without_a_line(tmp_path) -> None:
    figure = predicted.draw(tables_of_runs(tmp_path, estimate(device="cpu", target="cpu")))

    assert not figure.axes[0].lines
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["parameters", "noise"]


def test_without_a_target_there_is_nothing_to_draw(tmp_path) -> None:
    tables = tables_of_runs(tmp_path, estimate(device="cpu", target=None))

    with pytest.raises(NothingToDrawError, match="for a target"):
        predicted.draw(tables)
