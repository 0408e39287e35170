"""How long collectives take: tables inside a node, latency and bandwidth between nodes."""

import pytest

from dpprof.experiments.config.datasheets import A100, A100_40GB, H100, L4
from dpprof.experiments.config.parallel import Parallel
from dpprof.predict.memory.exchanges import Collective
from dpprof.predict.step_time.collective_time import CollectiveModel, interpolate_s
from dpprof.predict.step_time.op_time import UnknownTimeError
from dpprof.predict.step_time.product_table import read_document

TABLE = read_document("collectives")
NODE = Parallel(kind="fsdp", world_size=8)


def test_a_measured_size_takes_what_was_measured() -> None:
    size = 2**26
    measured = TABLE["times"]["h100"]["all-gather"]["8"][TABLE["bytes"].index(size)] / 1e7
    found = CollectiveModel(H100, NODE).predict(Collective("all-gather", size, 8))

    assert found.seconds == measured
    assert found.basis == "measured at this shape"
    assert 150 < size * 7 / 8 / found.seconds / 1e9 < 450, "below NVLink's 450 GB/s one way"


def test_between_sizes_time_is_a_latency_and_a_bandwidth() -> None:
    latency_s, bytes_per_s = 10e-6, 1e9
    sizes = [2**20, 2**24]
    times = [latency_s + size / bytes_per_s for size in sizes]

    assert interpolate_s(2**22, sizes, times) == pytest.approx(latency_s + 2**22 / bytes_per_s)
    assert interpolate_s(2**25, sizes, times) == 2 * times[-1]
    assert interpolate_s(1, sizes, times) == times[0]


@pytest.mark.parametrize(
    ("target", "nodes", "network", "mib", "published_gb_per_s"),
    [
        (A100, 2, 12.5, 1024, 86),  # NVIDIA/nccl-tests issue 175
        (A100_40GB, 3, 12.5, 128, 96),  # NVIDIA/nccl-tests issue 119
        (A100, 2, 6.25, 1024, 57),  # NVIDIA/nccl issue 837
    ],
)
def test_all_reduces_between_nodes_are_as_fast_as_others_measured(
    target, nodes, network, mib, published_gb_per_s
) -> None:
    ranks = 8 * nodes
    parallel = Parallel(kind="ddp", world_size=ranks, network_gb_per_s=network)
    found = CollectiveModel(target, parallel).predict(Collective("all-reduce", mib * 2**20, ranks))

    bus_bandwidth = 2 * (ranks - 1) / ranks * mib * 2**20 / found.seconds / 1e9
    assert bus_bandwidth == pytest.approx(published_gb_per_s, rel=0.35)
    assert found.spread > 0.2


def test_replicas_have_the_network_of_one_gpu_each() -> None:
    hsdp = Parallel(kind="hsdp", world_size=32, network_gb_per_s=50)
    found = CollectiveModel(H100, hsdp).predict(Collective("all-reduce", 2**30, 4))

    assert 2 * 3 / 4 * 2**30 / found.seconds / 1e9 < 50


@pytest.mark.parametrize(("name", "mib"), [("all-gather", 256), ("all-reduce", 1024)])
def test_the_node_with_the_fewest_gpus_binds_a_ring(name, mib) -> None:
    """Nine GPUs, of which one is alone on its node, share its port."""

    def take(ranks: int) -> float:
        parallel = Parallel(kind="fsdp", world_size=ranks, network_gb_per_s=50)
        return CollectiveModel(H100, parallel).predict(Collective(name, mib * 2**20, ranks)).seconds

    port = 0.88 * 50e9
    rounds = 2 if name == "all-reduce" else 1
    assert take(9) >= rounds * 8 / 9 * mib * 2**20 / port
    assert take(9) > take(10) > take(16) > take(8) * 0.9


def test_more_ranks_in_a_node_than_were_measured_have_the_bandwidth_of_the_most() -> None:
    def busbw(ranks: int) -> tuple[float, str, float]:
        parallel = Parallel(kind="fsdp", world_size=ranks, gpus_per_node=72)
        found = CollectiveModel(H100, parallel).predict(Collective("all-gather", 2**28, ranks))
        return (ranks - 1) / ranks * 2**28 / found.seconds, found.basis, found.spread

    of_8, of_72 = busbw(8), busbw(72)
    assert of_72[0] == pytest.approx(of_8[0])
    assert (of_8[1], of_72[1]) == ("measured at this shape", "extrapolated")
    assert of_72[2] == 2 * of_8[2]


def test_small_messages_between_nodes_are_less_sure() -> None:
    model = CollectiveModel(H100, Parallel(kind="ddp", world_size=16))
    small, large = (model.predict(Collective("all-reduce", 2**n, 16)) for n in (20, 24))
    assert small.spread > large.spread


def test_a_gpu_without_a_table_is_told() -> None:
    with pytest.raises(UnknownTimeError, match="known for the targets a100, a100-40gb, b200"):
        CollectiveModel(L4, NODE)
