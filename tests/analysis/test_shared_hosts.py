import datetime as dt

import pytest
from factory import CPU, make_experiment, tables_of_runs, write_synthetic

from dpprof.experiments.records.result import Result
from dpprof.results.analysis.conditions import SharedHosts, find_shared_hosts

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


H100, A100 = "NVIDIA H100", {"device": {"name": "NVIDIA A100"}}
# Runs, each on a GPU from and to a second; kinds of devices with shared and all runs, and the most.
CASES = {
    "one that overlaps and one alone": (
        [("x", 0, 10), ("y", 9, 12), ("x", 20, 30)],
        [(H100, True, 2, 3, 2)],
    ),
    "a long run beside all that come and go": (
        [("y", 1, 3), ("x", 0, 10), ("z", 2, 4), ("y", 5, 6)],
        [(H100, True, 4, 4, 3)],
    ),
    "one after the other": ([("x", 0, 10), ("y", 10, 20)], []),
    "the same GPU": ([("x", 0, 10), ("x", 5, 15)], []),
    "a GPU and a processor": ([("x", 0, 10), (None, 5, 15)], []),
    "two hosts": ([("x", 0, 10), ("y", 0, 10, {"host": "b"})], []),
    "a host without a name": ([(uuid, 0, 10, {"host": None}) for uuid in "xy"], []),
    "a failed run, which is not counted": (
        [("x", 0, 10), ("y", 5, 6, {"outcome": "oom"})],
        [(H100, True, 1, 1, 2)],
    ),
    "two kinds of GPUs, counted apart": (
        [("x", 0, 10), ("y", 5, 6, A100), ("y", 20, 30, A100)],
        [(H100, True, 1, 1, 2), ("NVIDIA A100", True, 1, 2, 2)],
    ),
    "predictions": ([(uuid, 0, 10, {"instrument": "estimate"}) for uuid in "xy"], []),
    "slots of a processor": (
        [(None, n, n + 2, {"device": {"pinned_to": [n % 2]}}) for n in range(3)],
        [("synthetic cpu", False, 3, 3, 2)],
    ),
    "a whole processor": ([(None, 0, 2), (None, 1, 3)], []),
}


@pytest.mark.parametrize("case", CASES)
def test_runs_that_shared_their_host_are_counted(ran, case) -> None:
    runs, shared = CASES[case]
    found = [ran(*run[:3], **(run[3] if len(run) > 3 else {})) for run in runs]

    assert find_shared_hosts(found) == [SharedHosts(*one) for one in shared]


def test_it_is_one_finding_for_all_runs(tmp_path) -> None:
    experiment = make_experiment(device="cuda")
    runs = [
        (experiment, "clean", {"replicate": number, "device": GPU | {"uuid": f"GPU-{number % 2}"}})
        for number in range(3)
    ]
    found = tables_of_runs(tmp_path, *runs)["findings"]

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
