"""Ceilings computed by hand from a device whose times the test invents, and real ones' bounds."""

import itertools

import pytest
import torch

from dpprof.experiments.config.target import DTYPES
from dpprof.measure.devices.cpu import Cpu
from dpprof.measure.devices.cuda import Cuda
from dpprof.measure.devices.device import time_repeats
from dpprof.measure.devices.limits import EXTENTS, Extent, measure_limits

SMALL = Extent((4, 8), (64, 128), budget_s=0.001, longest_s=100)


class InventedCpu(Cpu):
    """Says that its actions took so many seconds each, whatever they took."""

    def __init__(self, *seconds: float, first: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.seconds = itertools.chain(first, itertools.cycle(seconds))

    def durations_s(self, marks) -> list[float]:
        return [next(self.seconds) for _ in marks[1:]]


def test_flops_are_two_n_cubed_over_the_fastest_repeat_of_any_size() -> None:
    extent = Extent((4, 8), (64,), budget_s=16, longest_s=100)
    of_4 = [9, 4, 2, 2, 2, 2, 2, 2, 2]  # to warm up; once, once, twice and four times
    of_8 = [9, 12, 8]
    product = measure_limits(InventedCpu(*of_4, *of_8), extent).matmul["float32"]

    assert product.flops_per_s == 2 * 8**3 / 8 == 128.0
    assert product.size == 8
    assert [(one.seconds, one.median_s, one.repeats) for one in product.samples] == [
        (2, 2, 8),
        (8, 10, 2),
    ]
    assert product.stopped is None


def test_of_several_rounds_the_fastest_repeats_count() -> None:
    """4 x 4 takes 2 s in the first round and then 1 s; 8 x 8 was left out of the first."""
    extent = Extent((4, 8), (64,), 0, longest_s=15)
    of_first_round = (2.0,) * 10  # two each, of 4 x 4 in three dtypes, a copy and a launch
    limits = measure_limits(InventedCpu(1.0, first=of_first_round), extent, rounds=2)
    product = limits.matmul["float32"]

    assert product.flops_per_s == 2 * 8**3 / 1
    assert [(s.size, s.seconds, s.median_s, s.repeats) for s in product.samples] == [
        (4, 1, 1.5, 2),
        (8, 1, 1, 1),
    ]
    assert product.stopped is None
    # A copy counts what it reads and what it writes.
    assert limits.bandwidth.bytes_per_s == 2 * 64 / 1
    assert limits.launch_latency_s == 1 / 1000
    assert limits.matmul["tf32"] is None
    assert set(limits.reasons) == {"matmul.tf32"}


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_fails_is_null_with_the_reason_and_the_rest_is_measured(rounds, monkeypatch) -> None:
    ones, failures = torch.ones, iter([RuntimeError("can't allocate memory: 1 EiB")])

    def fail_once(*sizes, **options):
        for error in failures:
            raise error
        return ones(*sizes, **options)

    monkeypatch.setattr(torch, "ones", fail_once)
    limits = measure_limits(Cpu(), SMALL, rounds)

    of_copies = {"bandwidth": "RuntimeError: can't allocate memory: 1 EiB"} if rounds == 1 else {}
    assert limits.reasons == {"matmul.tf32": "a mode of CUDA matrix products"} | of_copies
    assert (limits.bandwidth is None) == (rounds == 1)
    assert limits.matmul["float32"] is not None
    assert limits.launch_latency_s is not None


def test_a_size_that_would_take_too_long_is_left_out_and_said() -> None:
    extent = Extent((4, 8), (64,), budget_s=0, longest_s=7.9)
    product = measure_limits(InventedCpu(1.0), extent).matmul["float64"]

    assert [one.size for one in product.samples] == [4]
    assert product.stopped == "8 would take longer than 7.9 s at a time"


def test_a_copy_of_an_array_moves_all_of_it(monkeypatch) -> None:
    """What is timed is a whole copy, into memory of its own."""
    actions = []
    device = InventedCpu(1.0)
    monkeypatch.setattr(device, "time", lambda act, _repeats: actions.append(act) or [1.0])
    measure_limits(device, Extent((4,), (4096,), budget_s=0, longest_s=1))
    copy = next(act for act in actions if act.func.__name__ == "copy_")
    destination, (source,) = copy(), copy.args

    assert destination.untyped_storage().nbytes() == 4096
    assert torch.equal(destination, source)
    assert destination.data_ptr() != source.data_ptr()


def test_a_real_cpu_has_positive_figures_and_the_ceiling_is_the_fastest_of_its_samples() -> None:
    limits = measure_limits(Cpu(), SMALL)

    assert set(limits.matmul) == set(DTYPES)
    for product in filter(None, limits.matmul.values()):
        rates = {one.size: 2 * one.size**3 / one.seconds for one in product.samples}
        assert product.flops_per_s == max(rates.values()) == rates[product.size] > 0
        assert all(0 < one.seconds <= one.median_s for one in product.samples)
    assert [one.array_bytes for one in limits.bandwidth.samples] == [64, 128]
    assert limits.bandwidth.bytes_per_s > 0
    assert limits.launch_latency_s > 0


def test_sizes_beyond_the_memory_are_left_out_and_said(monkeypatch) -> None:
    ones = torch.ones

    def at_most_64_bytes(elements, **options):
        if elements > 16:
            raise torch.OutOfMemoryError("out of memory")
        return ones(elements, **options)

    monkeypatch.setattr(torch, "ones", at_most_64_bytes)
    copies = measure_limits(Cpu(), SMALL).bandwidth

    assert [one.array_bytes for one in copies.samples] == [64]
    assert copies.stopped == "128: OutOfMemoryError: out of memory"


def test_the_first_time_only_warms_up() -> None:
    calls, device = [], InventedCpu(9.0, 1.0, 2.0)
    seconds = time_repeats(lambda count: device.time(lambda: calls.append(1), count), budget_s=2.5)

    assert seconds == [1.0, 2.0]
    assert len(calls) == 3


@pytest.mark.gpu
def test_a_gpu_has_figures_too() -> None:
    extent = EXTENTS["cuda"]._replace(sizes=(4096,), array_bytes=(2**30,))
    limits = measure_limits(Cuda(), extent)

    assert limits.bandwidth is not None, limits.reasons
    assert limits.matmul["bfloat16"].flops_per_s > limits.matmul["float32"].flops_per_s
    assert 1e-7 < limits.launch_latency_s < 1e-3
