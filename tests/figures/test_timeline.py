import pytest
from factory import make_experiment, make_memory, tables_of_runs

from dpprof.results.figures import timeline

MIB = 2**20
OWNED = {"parameters": 8 * MIB, "saved_activations": 16 * MIB}


def kept(instrument="memory", owned=OWNED, phase="backward", **fields):
    return make_experiment(**fields), instrument, {"recorded": make_memory(owned, phase=phase)}


def test_areas_are_the_live_bytes_over_the_operators(tmp_path) -> None:
    (axis,) = timeline.draw(tables_of_runs(tmp_path, kept())).axes
    parameters, activations = axis.collections

    assert [area.get_label() for area in axis.collections] == ["parameters", "saved activations"]
    # Half of all is alive before and after the peak, which is at operator 4 of 10.
    upper = {tuple(point) for point in parameters.get_paths()[0].vertices}
    assert upper >= {(0, 4), (4, 8), (10, 4), (0, 0), (10, 0)}
    upper = {tuple(point) for point in activations.get_paths()[0].vertices}
    assert upper >= {(0, 12), (4, 24), (10, 12), (0, 4), (10, 4)}
    assert axis.get_xlim() == (0, 10)


def test_phases_stand_on_top_and_the_peak_is_told(tmp_path) -> None:
    (axis,) = timeline.draw(tables_of_runs(tmp_path, kept(phase="second_backward"))).axes
    texts = [text.get_text() for text in axis.texts]
    strip = [(patch.get_x(), patch.get_width()) for patch in axis.patches]

    assert texts == ["forward", "second backward", "24.0 MiB in second backward"]
    assert strip == [(0, 4), (4, 6)]  # the step's last instant has no operator of its own
    (peak,) = axis.lines
    assert (list(peak.get_xdata()), list(peak.get_ydata())) == ([4], [24.0])


@pytest.mark.parametrize("at", [0, 5, 9])
def test_what_is_said_of_the_peak_stays_within_its_panel(tmp_path, at) -> None:
    recorded = make_memory({"parameters": 888 * MIB}, phase="second_backward")
    recorded["memory"]["timeline"] |= {
        "ops": list(range(10)),
        "phase": ["second_backward"] * 10,
        "components": {"parameters": [(888 if op == at else 8) * MIB for op in range(10)]},
    }
    runs = [
        (make_experiment(method=method), "memory", {"recorded": recorded})
        for method in ("standard", "flash", "flash-bk")
    ]
    figure = timeline.draw(tables_of_runs(tmp_path, *runs))
    figure.canvas.draw()

    panels = [axis for axis in figure.axes if axis.get_title()]
    assert len(panels) == 3
    for axis in panels:
        (text,) = [one for one in axis.texts if " in second backward" in one.get_text()]
        panel, told = axis.get_window_extent(), text.get_window_extent()
        assert panel.x0 <= told.x0
        assert told.x1 <= panel.x1


def test_a_phase_that_is_too_short_for_its_name_has_a_shorter_one_or_none(tmp_path) -> None:
    recorded = make_memory(OWNED)
    recorded["memory"]["timeline"] |= {
        "ops": [0, 9, 15, 15, 200],
        "phase": ["forward", "backward", "noise", "step", "step"],
        "components": {"parameters": [8 * MIB, 24 * MIB, 8 * MIB, 8 * MIB, 8 * MIB]},
    }
    run = (make_experiment(), "memory", {"recorded": recorded})
    (axis,) = timeline.draw(tables_of_runs(tmp_path, run)).axes

    # 9 of 200 operators leave no room for "fwd", 6 none for "bwd", and noise had none.
    assert [text.get_text() for text in axis.texts][:3] == ["", "", "step"]
    recorded["memory"]["timeline"]["ops"] = [0, 20, 40, 40, 200]
    (axis,) = timeline.draw(tables_of_runs(tmp_path, run)).axes
    assert [text.get_text() for text in axis.texts][:3] == ["fwd", "bwd", "step"]


def test_panels_have_one_scale_of_bytes(tmp_path) -> None:
    twice = {name: 2 * size for name, size in OWNED.items()}
    tables = tables_of_runs(tmp_path, kept(), kept(method="opacus-hooks", owned=twice))
    left, right = timeline.draw(tables).axes

    assert left.get_ylim() == right.get_ylim()
    assert left.get_ylim()[1] > 48


TITLES = {
    "most methods": (
        [
            kept(instrument="estimate", batch_size=2),
            kept(instrument="estimate", batch_size=2, method="opacus-hooks"),
            kept(batch_size=9),
        ],
        "V16-d8-L1-H2, T = 4, B = 2 (estimate)",
    ),
    "a timeline before an estimate": (
        [kept(batch_size=2), kept(instrument="estimate", batch_size=9)],
        "V16-d8-L1-H2, T = 4, B = 2 (memory)",
    ),
    "this device before a target": (
        [
            kept(instrument="estimate", batch_size=2),
            kept(instrument="estimate", batch_size=9, device="cuda", target="h200"),
            kept("estimate", batch_size=9, device="cuda", target="h200", method="opacus-hooks"),
        ],
        "V16-d8-L1-H2, T = 4, B = 2 (estimate)",
    ),
    "the largest": (
        [kept(batch_size=2), kept(batch_size=9)],
        "V16-d8-L1-H2, T = 4, B = 9 (memory)",
    ),
    "a target": (
        [kept(instrument="estimate", device="cuda", target="h200")],
        "V16-d8-L1-H2, T = 4, B = 2 on h200 (estimate)",
    ),
}


@pytest.mark.parametrize("case", TITLES)
def test_the_setting_is_the_one_that_tells_most(case, tmp_path) -> None:
    runs, title = TITLES[case]

    assert timeline.draw(tables_of_runs(tmp_path, *runs)).get_suptitle() == title


def test_large_models_are_drawn_in_gib(tmp_path) -> None:
    (axis,) = timeline.draw(tables_of_runs(tmp_path, kept(owned={"parameters": 5 * 2**30}))).axes

    assert axis.get_ylabel() == "live memory (GiB)"
    assert axis.texts[-1].get_text() == "5.0 GiB in backward"
