import pytest
from factory import make_experiment

from dpprof.experiments.records.reconciliation import JOINED, bound_bytes, reconcile

EVIDENCE = {"identity": 10, "birthplace": 0, "phase": 0}
MIB = 2**20


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({}, MIB),
        ({"dtype": "bfloat16"}, 5 * MIB),
        ({"device": "cuda"}, 5 * MIB),
        ({"device": "cuda", "dtype": "bfloat16"}, 5 * MIB),
    ],
)
def test_bounds_are_shares_of_the_peak(fields, bound) -> None:
    assert bound_bytes(make_experiment(**fields), 1000 * MIB) == pytest.approx(
        bound, abs=1 * MIB * 0.1
    )
    assert bound_bytes(make_experiment(**fields), 1) == 64 * 1024


def test_a_gap_within_the_bound_is_valid_either_way() -> None:
    experiment = make_experiment()
    for gap in (0, 64 * 1024, -64 * 1024):
        recorded = reconcile(experiment, MIB, MIB + gap, EVIDENCE)
        assert (recorded.valid, recorded.gap_bytes, recorded.reason) == (True, gap, None)


def test_what_whole_blocks_take_is_no_gap() -> None:
    recorded = reconcile(make_experiment(), 25 * MIB, 26 * MIB, EVIDENCE, rounding_bytes=MIB)
    assert (recorded.valid, recorded.gap_bytes, recorded.rounding_bytes) == (True, 0, MIB)


def test_a_gap_beyond_the_bound_is_not_and_says_why() -> None:
    recorded = reconcile(make_experiment(), MIB, MIB + 64 * 1024 + 1, EVIDENCE)

    assert recorded.valid is False
    assert recorded.reason == "the gap of 65,537 bytes exceeds its bound of 65,536"


def test_an_unknown_peak_is_null_with_a_reason() -> None:
    recorded = reconcile(make_experiment(), MIB, None, EVIDENCE)

    assert recorded.valid is recorded.gap_bytes is recorded.allocator_peak_bytes is None
    assert recorded.reason == JOINED


@pytest.mark.parametrize("allocator_peak", [None, 10**9])
def test_a_reason_names_what_may_have_allocated_more(allocator_peak) -> None:
    told = reconcile(make_experiment(), 10**8, allocator_peak, {}, unknown=["convolution", "lstm"])
    without = reconcile(make_experiment(), 10**8, allocator_peak, {})

    assert told.reason == f"{without.reason}; not all workspaces are known, of convolution, lstm"


def test_there_is_no_reason_where_peaks_agree() -> None:
    assert reconcile(make_experiment(), 10**8, 10**8, {}, unknown=["convolution"]).reason is None
