import datetime as dt

import pytest
from factory import CPU, make_experiment, make_manifest, write_synthetic

from dpprof.analysis.collection import collect
from dpprof.analysis.conditions import SharedHosts, find_shared_hosts
from dpprof.analysis.tables.build import build_tables
from dpprof.records.result import Result

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
GPU = {"type": "cuda", "name": "NVIDIA H100"}


@pytest.fixture
def ran(tmp_path):
    """Return a function for a run on a GPU, from and to a second after noon."""
    pattern = write_synthetic(tmp_path, make_experiment())

    def make(
        uuid: str | None, begin: float, end: float, *, host: str | None = "a", **fields
    ) -> Result:
        device = CPU if uuid is None else GPU | {"uuid": uuid}
        changed = {
            "device": device | fields.pop("device", {}),
            "provenance": {"host": {"hostname": host}},
            "started_at": (NOON + dt.timedelta(seconds=begin)).isoformat(),
            "wall_s": end - begin,
        }
        return pattern.model_copy(update=changed | fields)

    return make


def test_runs_that_overlap_on_two_gpus_are_counted_and_one_alone_is_not(ran) -> None:
    runs = [ran("x", 0, 10), ran("y", 9, 12), ran("x", 20, 30)]

    assert find_shared_hosts(runs) == [SharedHosts("NVIDIA H100", True, 2, 3, 2)]


def test_a_long_run_shares_with_all_that_come_and_go_beside_it(ran) -> None:
    runs = [ran("y", 1, 3), ran("x", 0, 10), ran("z", 2, 4), ran("y", 5, 6)]

    assert find_shared_hosts(runs) == [SharedHosts("NVIDIA H100", True, 4, 4, 3)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("x", 0, 10), ("y", 10, 20)),
        (("x", 0, 10), ("x", 5, 15)),
        (("x", 0, 10), (None, 5, 15)),
    ],
    ids=["one after the other", "the same GPU", "a processor"],
)
def test_what_does_not_share_is_none(ran, first, second) -> None:
    assert find_shared_hosts([ran(*first), ran(*second)]) == []


def test_hosts_are_told_apart_and_one_without_a_name_is_nobodys(ran) -> None:
    assert find_shared_hosts([ran("x", 0, 10), ran("y", 0, 10, host="b")]) == []
    assert find_shared_hosts([ran(u, 0, 10, host=None) for u in "xy"]) == []


def test_a_failed_run_is_company_and_is_not_counted(ran) -> None:
    runs = [ran("x", 0, 10), ran("y", 5, 6, outcome="oom")]

    assert find_shared_hosts(runs) == [SharedHosts("NVIDIA H100", True, 1, 1, 2)]


def test_kinds_of_gpus_share_a_host_and_are_counted_apart(ran) -> None:
    other = {"name": "NVIDIA A100"}
    runs = [ran("x", 0, 10), ran("y", 5, 6, device=other), ran("y", 20, 30, device=other)]

    assert find_shared_hosts(runs) == [
        SharedHosts("NVIDIA H100", True, 1, 1, 2),
        SharedHosts("NVIDIA A100", True, 1, 2, 2),
    ]


def test_predictions_share_nothing(ran) -> None:
    runs = [ran(uuid, 0, 10, instrument="estimate") for uuid in "xy"]

    assert find_shared_hosts(runs) == []


def test_slots_of_a_processor_share_it_and_a_whole_processor_is_nobodys(ran) -> None:
    slots = [{"pinned_to": [0]}, {"pinned_to": [1]}, {"pinned_to": [0]}]
    runs = [ran(None, begin, begin + 2, device=slot) for begin, slot in enumerate(slots)]

    assert find_shared_hosts(runs) == [SharedHosts("synthetic cpu", False, 3, 3, 2)]
    assert find_shared_hosts([ran(None, 0, 2), ran(None, 1, 3)]) == []


def test_it_is_one_finding_for_all_runs(tmp_path) -> None:
    experiment = make_experiment(device="cuda")
    for number in range(3):
        device = GPU | {"uuid": f"GPU-{number % 2}"}
        write_synthetic(tmp_path, experiment, replicate=number, device=device)
    manifest = make_manifest(*((experiment, number) for number in range(3)))
    found = build_tables(collect(manifest, tmp_path, partial=False))["findings"]

    assert found.to_dict("records") == [
        {
            "kind": "shared-host",
            "experiment_id": "NVIDIA H100",
            "instrument": "",
            "finding": "3 of 3 runs were measured while others ran on other GPUs of their host, "
            "at most 2 at once: they share the host's cores, its PCIe and its power, so their "
            "times may be too long",
        }
    ]
