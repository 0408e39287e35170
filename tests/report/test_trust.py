"""Whether page one says how the peaks came about that it calls confirmed."""

import pytest
from factory import make_experiment, make_memory, make_predicted_time, tables_of_runs

from dpprof.results.report.answer.trust import build_trust_section

PEAK = 2**20


@pytest.mark.parametrize("instrument", ["memory", "estimate"])
def test_peaks_are_recorded_or_predicted(tmp_path, instrument) -> None:
    runs = []
    for gap, method in enumerate(("standard", "flash")):
        one, held = make_experiment(method=method), make_memory({"parameters": PEAK + 8 * gap})
        held |= {"time": make_predicted_time(0.02)} if instrument == "estimate" else {}
        runs.append((one, "clean", {"peak_allocated_bytes": PEAK, "step_s": (0.021 + gap,)}))
        # A replicate of a prediction is no other experiment.
        runs += [(one, instrument, {"recorded": held, "replicate": number}) for number in (0, 1)]
    [lines] = build_trust_section(tables_of_runs(tmp_path, *runs)).blocks
    said = {
        "memory": "Recorded peaks agree with the allocator's in 2 of 2 experiments (largest gap ",
        "estimate": (
            "On this machine 1 of 2 predicted memory peaks are exact; the largest gap is 8 "
            "bytes. On this machine steps take 1.05 to 51.05 times the predicted time; 1 of 2 step "
            "times are inside the predicted 90 % interval."
        ),
    }

    assert said[instrument] in lines.items[0]
