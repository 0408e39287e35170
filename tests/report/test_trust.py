"""Whether page one says how the peaks came about that it calls confirmed."""

import pytest
from factory import make_experiment, make_memory, tables_of_runs

from dpprof.report.answer.trust import build_trust_section

PEAK = 2**20


@pytest.mark.parametrize(
    ("instruments", "said"),
    [
        (["memory", "memory"], "Recorded peaks agree"),
        (["estimate", "estimate"], "Predicted peaks agree"),
        (["memory", "estimate"], "Recorded and predicted peaks agree"),
    ],
)
def test_peaks_are_recorded_or_predicted(tmp_path, instruments, said) -> None:
    runs = []
    for method, instrument in zip(("standard", "flash"), instruments, strict=True):
        one, held = make_experiment(method=method), make_memory({"parameters": PEAK})
        runs.append((one, "clean", {"peak_allocated_bytes": PEAK}))
        runs.append((one, instrument, {"recorded": held}))
    [lines] = build_trust_section(tables_of_runs(tmp_path, *runs)).blocks

    expected = f"{said} with the allocator's in 2 of 2 experiments (largest gap 0.00%)."
    assert expected in lines.items[1]
