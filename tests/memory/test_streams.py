"""Where operators of ranks run, and in which order ranks exchange what."""

import gc

import pytest
from factory import make_experiment

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.parallel import Parallel
from dpprof.measure.instruments import memory
from dpprof.predict import tracing
from dpprof.predict.estimate import trace_steps
from dpprof.predict.flops.cost import Cost
from dpprof.predict.memory.events import Op
from dpprof.predict.memory.exchanges import (
    COMMUNICATION,
    COMPUTE,
    COPY_IN,
    REPLICATION,
    Collective,
    place,
)
from dpprof.private.substitutes import substitute

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"vocab_size": 1000, "d_model": 64, "layers": 3, "heads": 4}
LARGE = {"vocab_size": 4000, "d_model": 512, "layers": 6, "heads": 4}
"""More than DDP's bucket of 25 MiB."""

COPIES = ("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy", "fsdp.chunk_cat")


def list_exchanges(step, parallel) -> list[tuple[str, str, Collective | None]]:
    """List collectives and FSDP's copies in order."""
    placed = place(step.ops, parallel)
    return [
        (op.phase, op.name, one.collective)
        for op, one in zip(step.ops, placed, strict=True)
        if one.collective or op.name in COPIES
    ]


def record(spec: str) -> list[tuple[str, str, Collective | None]]:
    """Train in one of several processes, and list what its last step exchanged."""
    gc.collect()  # a sharded model refers to itself
    found = []

    def keep(step, parallel):
        found.extend(list_exchanges(step, parallel))

    with substitute(tracing, "state_communication", keep):
        memory.measure(Experiment.model_validate_json(spec), lambda _: None)
    return found


QUICK = [("standard", "fsdp", 2, SMALL), ("flash-bk", "fsdp", 2, SMALL)]
EVERY = [
    (method, kind, size, SMALL)
    for size in (2, 4)
    for method in ("standard", "flash", "flash-bk", "opacus-ghost", "opacus-hooks")
    for kind in ("ddp", "fsdp")
    if (method, kind) != ("opacus-hooks", "fsdp")
]
EVERY += [("standard", "ddp", 2, LARGE), ("standard", "hsdp,gpus_per_node=2", 4, SMALL)]


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in EVERY)], ids=str
)
def test_ranks_exchange_in_the_predicted_order(pools, case) -> None:
    method, kind, size, model = case
    parallel = f"kind={kind},world_size={size}"
    fields = {"model": model, "method": method, "seq_len": 24, "parallel": parallel}
    experiment = make_experiment(warmup_steps=2, **fields)

    ranks = pools[size].compute(record, experiment.model_dump_json())
    predicted = list_exchanges(trace_steps(experiment, lambda _: None).steady, experiment.parallel)

    assert predicted
    for recorded in ranks:
        assert recorded == predicted


def op(name: str, reads=(), writes=(), phase="forward") -> Op:
    """An operator that moves four bytes of each storage, or what a pair says."""
    moved = [
        [one if isinstance(one, tuple) else (one, 4) for one in some] for some in (reads, writes)
    ]
    return Op(phase, None, "other", Cost(name, "copy", 0, "float32"), *moved, at_s=0.0, name=name)


def gather(number: int, phase="forward") -> list[Op]:
    """FSDP's gather into a storage: the copy in, the collective, the copy out."""
    buffer, own = (number, 16), (number, 4)
    return [
        op("fsdp.all_gather_copy_in", [100], [own, buffer], phase),
        op("c10d._allgather_base_", [buffer, own], [buffer], phase),
        op("fsdp.split_with_sizes_copy", [buffer], [number + 1], phase),
    ]


def test_a_gather_of_forward_waits_for_the_copy_out_before_the_last() -> None:
    placed = place([*gather(0), *gather(10), *gather(20)], Parallel(kind="fsdp", world_size=4))

    assert [one.stream for one in placed] == 3 * [COPY_IN, COMMUNICATION, COMPUTE]
    assert [one.waits for one in placed] == [(), (0,), (1,), (), (3,), (4,), (2,), (6,), (7,)]
    assert placed[1].collective == Collective("all-gather", 16, 4)


def test_a_gather_of_backward_waits_for_the_last_copy_out() -> None:
    ops = [*gather(0, "backward"), *gather(10, "backward")]
    placed = place(ops, Parallel(kind="fsdp", world_size=4))

    assert placed[3].waits == (2,)


def test_gradients_are_joined_once_the_reduce_scatter_before_has_ended() -> None:
    def reduce(number: int) -> list[Op]:
        return [
            op("fsdp.chunk_cat", [number], [(number + 1, 16)], "backward"),
            op(
                "c10d._reduce_scatter_base_", [(number + 2, 4), (number + 1, 16)], [(number + 2, 4)]
            ),
        ]

    step = op("add", [2, 12], [50], "step")
    ops = [*reduce(0), *reduce(10), op("c10d._reduce_scatter_base_", [(60, 4), (50, 16)]), step]
    placed = place(ops, Parallel(kind="fsdp", world_size=4))

    streams = [COMPUTE, COMMUNICATION, COMPUTE, COMMUNICATION, COMPUTE, COMPUTE]
    assert [one.stream for one in placed] == streams, "one that FSDP does not issue runs in line"
    assert placed[2].waits == (1,)
    assert set(placed[5].waits) == {1, 3}


def test_replicas_reduce_what_is_left_of_a_reduce_scatter() -> None:
    ops = [
        op("fsdp.chunk_cat", [0], [(1, 64)]),
        op("c10d._reduce_scatter_base_", [(2, 8), (1, 64)], [(2, 8)]),
        op("c10d.allreduce_", [(2, 8)], [(2, 8)]),
    ]
    placed = place(ops, Parallel(kind="hsdp", world_size=32))

    assert placed[1].collective == Collective("reduce-scatter", 64, 8)
    assert placed[2].collective == Collective("all-reduce", 8, 4)
    assert placed[2].stream == REPLICATION
