"""Whether page one says how the peaks came about that it calls confirmed."""

import pytest
from factory import make_experiment, make_manifest, make_memory, write_synthetic
from html_pages import tables_of

from dpprof.planning.planner import Manifest
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
        one = make_experiment(method=method)
        write_synthetic(tmp_path, one, peak_allocated_bytes=PEAK)
        held = make_memory({"parameters": PEAK})
        write_synthetic(tmp_path, one, instrument=instrument, recorded=held)
        runs += make_manifest((one, 0)).runs
        runs += make_manifest((one, 0), instrument=instrument).runs
    [lines] = build_trust_section(tables_of(tmp_path, Manifest(runs=tuple(runs)))).blocks

    expected = f"{said} with the allocator's in 2 of 2 experiments (largest gap 0.00%)."
    assert expected in lines.items[1]
