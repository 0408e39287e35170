"""Tests of predictions from operators that were timed on this machine."""

import math
from importlib.metadata import version

import pytest
import torch
from factory import write_synthetic_ceilings

from dpprof.experiments.records.ceilings import OperatorShape, OperatorTable, OperatorTime
from dpprof.predict.flops.cost import Cost
from dpprof.predict.flops.op_call import describe_call
from dpprof.predict.memory.events import Op
from dpprof.predict.step_time.op_time import UnknownTimeError
from dpprof.predict.step_time.own_table import OwnTable, read_own_table, shape_of
from dpprof.predict.step_time.predict import predict_step_here
from dpprof.system.hardware import available_cores, cpu_name

RATE, BANDWIDTH = 1e11, 1e10


def timed(op: str, size: int, seconds: float, **fields) -> OperatorTime:
    usual = {"op": op, "call": f"{op} {size}", "layout": f"{op} whole", "family": "elementwise"}
    usual |= {"dtype": "float32", "flops": size, "read_bytes": 4 * size, "written_bytes": 4 * size}
    usual |= {"row": 1, "product": None, "seconds": seconds, "spread": 0.03}
    return OperatorTime.model_validate(usual | fields)


def multiplied(m: int, n: int, k: int, share: float = 0.5) -> OperatorTime:
    flops = 2 * m * n * k
    sizes = {
        "family": "matmul",
        "product": (1, m, n, k),
        "read_bytes": 4 * (m * k + k * n),
        "written_bytes": 4 * m * n,
    }
    return timed("mm", m * n * k, flops / RATE / share, flops=flops, **sizes)


LEAST = timed("neg", 1, 1e-7, family="other")
"""The least call; what moves a megabyte takes a thousand times as long."""


def tabulate(*operators: OperatorTime, **fields) -> OperatorTable:
    usual = {"operators": operators, "threads": 1, "rounds": 5, "drift": 0.1, "wall_s": 0.0}
    usual |= {"host_s": 0.0, "host_spread": 0.1, "step_factor": 1.0}
    return OperatorTable.model_validate(usual | {"experiments": [], "left_out": {}} | fields)


def make(*operators: OperatorTime, **fields) -> OwnTable:
    return OwnTable(tabulate(*operators, LEAST, **fields))


def add(size: int, **fields) -> OperatorShape:
    one = timed("add", size, 1.0).model_dump(exclude={"seconds", "spread"})
    return OperatorShape.model_validate(one | fields)


def copies(*sizes: int) -> list[OperatorTime]:
    return [timed("add", size, 8 * size / BANDWIDTH) for size in sizes]


def test_what_was_timed_takes_its_own_time() -> None:
    table = make(*copies(10**6), timed("add", 10**7, 5.0))

    found = table.predict(add(10**7))

    assert (found.seconds, found.spread, found.basis) == (5.0, 0.03, "measured at this shape")


@pytest.mark.parametrize(
    ("size", "others"),
    [(10**7, {}), (10**6, {"op": "mul", "call": "mul", "layout": "mul whole"})],
    ids=["between sizes", "of the same family"],
)
def test_an_operator_takes_the_speed_of_those_like_it(size, others) -> None:
    found = make(*copies(10**5, 10**6, 10**8)).predict(add(size, **{"call": "new"} | others))

    assert found.basis == "interpolated"
    assert found.seconds == pytest.approx(8 * size / BANDWIDTH, rel=1e-3)


def test_beyond_the_sizes_that_were_timed_the_spread_doubles() -> None:
    table = make(*copies(10**5, 10**6, 10**7), timed("add", 3 * 10**6, 4e-3))
    inside, beyond = table.predict(add(2 * 10**6)), table.predict(add(10**9))

    assert (inside.basis, beyond.basis) == ("interpolated", "extrapolated")
    assert beyond.spread == pytest.approx(2 * inside.spread)


def test_an_operator_that_nothing_resembles_has_a_wide_interval() -> None:
    asked = add(10**6, op="sort", call="sort", family="indexing", dtype="int64")
    found = make(*copies(10**5, 10**7)).predict(asked)

    assert found.basis == "extrapolated"
    assert found.spread > 0.5


def test_products_go_by_their_sizes() -> None:
    fast = [multiplied(m, 512, 512) for m in (128, 256, 1024)]
    slow = [multiplied(m, 16, 512, share=0.05) for m in (128, 256, 1024)]
    table = make(*fast, *slow)

    def predict(m: int, n: int, k: int) -> float:
        one = multiplied(m, n, k).model_copy(update={"call": "new"})
        return one.flops / RATE / table.predict(one).seconds

    assert predict(512, 512, 512) == pytest.approx(0.5, rel=0.05)
    assert predict(512, 16, 512) == pytest.approx(0.05, rel=0.1)


def test_operators_whose_arguments_lie_otherwise_count_less() -> None:
    sizes = [10**5 * 2**doublings for doublings in range(14)]
    slow = [timed("add", n, 50 * 8 * n / BANDWIDTH, call=f"p {n}", layout="p") for n in sizes]
    table = make(*copies(*sizes), *slow)
    whole, permuted = table.predict(add(3 * 10**6)), table.predict(add(3 * 10**6, layout="p"))

    assert permuted.seconds / whole.seconds == pytest.approx(50, rel=0.1)


def test_held_out_operators_are_predicted_without_their_own_size() -> None:
    table = make(*copies(10**5, 10**6, 10**7), timed("add", 3 * 10**6, 3 * 8 * 3e6 / BANDWIDTH))
    errors = {
        round(math.log10(one.flops), 1): found / true for found, true, one in table.hold_out()
    }

    assert errors[6.5] == pytest.approx(1 / 3, rel=0.05)
    assert len(errors) == 4
    assert make(*copies(10**6)).hold_out() == []  # one operator alone cannot be held out


def test_a_table_of_other_threads_or_of_another_pytorch_predicts_nothing(tmp_path) -> None:
    cpu = {"type": "cpu", "name": cpu_name(), "cores": available_cores()}
    table = tabulate(*copies(10), threads=available_cores(), drift=None, host_s=1.0)
    with pytest.raises(UnknownTimeError, match="no operators were timed on this machine; dpprof"):
        read_own_table(tmp_path, None)
    for torch_version, threads, problem in [
        ("1.0", None, r"timed by PyTorch 1\.0, and this is"),
        (version("torch"), available_cores() + 1, r"on \d+ threads, and this has"),
    ]:
        provenance = {"packages": {"torch": torch_version}}
        write_synthetic_ceilings(tmp_path, cpu, operators=table, provenance=provenance)
        with pytest.raises(UnknownTimeError, match=problem):
            read_own_table(tmp_path, threads)

    assert read_own_table(tmp_path, available_cores()).host_s == 1.0


def test_a_step_is_its_operators_as_slow_as_in_steps_and_the_host_between_them() -> None:
    call = describe_call(torch.ops.aten.neg.default, (torch.ones(4),), {})
    cost = Cost("neg", "elementwise", 1, "float32")
    ops = [Op(phase, None, "other", cost, [], [], 0.0, call) for phase in ("forward", "step")]
    known = OperatorTime(**shape_of(ops[0]).model_dump(), seconds=2.0, spread=0.1)
    step = predict_step_here(ops, make(known, host_s=1.0, step_factor=1.5))

    assert step.median == pytest.approx(2 * 1.5 * 2.0 + 2 * 1.0)
    assert step.without_update == pytest.approx(1.5 * 2.0 + 1.0)
    assert step.low < step.median < step.high
    assert step.rests_on["measured at this shape"] == pytest.approx(1)
