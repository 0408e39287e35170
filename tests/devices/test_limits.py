"""Ceilings computed by hand from a clock that is told what to say, and real ones' bounds."""

import pytest
import torch

from dpprof.devices.cpu import Cpu
from dpprof.devices.cuda import Cuda
from dpprof.devices.device import StepClock
from dpprof.devices.limits import EXTENTS, Extent, keep_fastest, measure_limits, time_repeats
from dpprof.spec.target import DTYPES

SMALL = Extent((4, 8), (64, 128), budget_s=0.001, longest_s=100)


class ToldClock(StepClock):
    """Says that its device's actions took so many seconds each, whatever they took."""

    def __init__(self, device) -> None:
        self.device = device
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1

    def durations_s(self) -> list[float]:
        return [next(self.device.seconds) for _ in range(self.ticks - 1)]


class ToldCpu(Cpu):
    def __init__(self, seconds) -> None:
        super().__init__()
        self.seconds = iter(seconds)

    def clock(self) -> ToldClock:
        return ToldClock(self)


def repeating(*seconds: float):
    while True:
        yield from seconds


def test_flops_are_two_n_cubed_over_the_fastest_repeat_of_any_size() -> None:
    extent = Extent((4, 8), (), budget_s=16, longest_s=100)
    of_4 = [9, 4, 2, 2, 2, 2, 2, 2, 2]  # to warm up; once, once, twice and four times
    of_8 = [9, 12, 8]
    product = measure_limits(ToldCpu(repeating(*of_4, *of_8)), extent).matmul["float32"]

    assert product.flops_per_s == 2 * 8**3 / 8 == 128.0
    assert product.size == 8
    assert [(one.seconds, one.median_s, one.repeats) for one in product.samples] == [
        (2, 2, 8),
        (8, 10, 2),
    ]
    assert product.stopped is None


def test_of_several_rounds_the_fastest_repeats_count() -> None:
    """4 x 4 takes 2 s in one round and 1 s in another; 8 x 8 was left out of the first."""
    slow = measure_limits(ToldCpu(repeating(2.0)), Extent((4, 8), (64,), 0, longest_s=15))
    fast = measure_limits(ToldCpu(repeating(1.0)), Extent((4, 8), (64,), 0, longest_s=15))
    merged = keep_fastest([slow, fast])
    product = merged.matmul["float32"]

    assert product.flops_per_s == 2 * 8**3 / 1
    assert [(s.size, s.seconds, s.median_s, s.repeats) for s in product.samples] == [
        (4, 1, 1.5, 2),
        (8, 1, 1, 1),
    ]
    assert product.stopped is None
    assert merged.bandwidth.bytes_per_s == 2 * 64 / 1
    assert merged.launch_latency_s == 1 / 1000
    assert merged.matmul["tf32"] is None
    assert set(merged.reasons) == {"matmul.tf32"}


def test_what_one_round_has_needs_no_reason(monkeypatch) -> None:
    whole = measure_limits(Cpu(), SMALL)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: 1 / 0)
    without = measure_limits(Cpu(), SMALL)

    assert "bandwidth" in without.reasons
    assert keep_fastest([without, whole]).bandwidth == whole.bandwidth
    assert set(keep_fastest([without, whole]).reasons) == {"matmul.tf32"}
    assert "bandwidth" in keep_fastest([without, without]).reasons


def test_a_size_that_would_take_too_long_is_left_out_and_said() -> None:
    extent = Extent((4, 8), (), budget_s=0, longest_s=7.9)
    product = measure_limits(ToldCpu(repeating(1.0)), extent).matmul["float64"]

    assert [one.size for one in product.samples] == [4]
    assert product.stopped == "8 would take longer than 7.9 s at a time"


def test_copies_count_what_is_read_and_what_is_written() -> None:
    extent = Extent((4,), (64,), budget_s=0, longest_s=100)
    limits = measure_limits(ToldCpu(repeating(0.5)), extent)

    assert limits.bandwidth.bytes_per_s == 2 * 64 / 0.5
    assert limits.launch_latency_s == 0.5 / 1000


def test_a_copy_of_an_array_moves_all_of_it(monkeypatch) -> None:
    """What is timed is a whole copy, into memory of its own."""
    copied = []
    monkeypatch.setattr(
        "dpprof.devices.limits.time_repeats",
        lambda _device, act, _budget: copied.append((act(), act.args[0])) or [1.0],
    )
    extent = Extent((), (4096,), budget_s=0, longest_s=1)
    measure_limits(Cpu(), extent)
    destination, source = copied[0]

    assert destination.untyped_storage().nbytes() == 4096
    assert torch.equal(destination, source)
    assert destination.data_ptr() != source.data_ptr()


def test_a_real_cpu_has_positive_figures_and_the_ceiling_is_the_fastest_of_its_samples() -> None:
    limits = measure_limits(Cpu(), SMALL)

    assert set(limits.matmul) == set(DTYPES)
    assert limits.reasons == {"matmul.tf32": "a mode of CUDA matrix products"}
    assert limits.matmul["tf32"] is None
    for product in filter(None, limits.matmul.values()):
        rates = {one.size: 2 * one.size**3 / one.seconds for one in product.samples}
        assert product.flops_per_s == max(rates.values()) == rates[product.size] > 0
        assert all(0 < one.seconds <= one.median_s for one in product.samples)
    assert [one.array_bytes for one in limits.bandwidth.samples] == [64, 128]
    assert limits.bandwidth.bytes_per_s > 0
    assert limits.launch_latency_s > 0


def test_what_fails_is_null_with_the_reason_and_the_rest_is_measured(monkeypatch) -> None:
    def refuse(*_, **__):
        raise RuntimeError("can't allocate memory: you tried to allocate 1 EiB")

    monkeypatch.setattr(torch, "ones", refuse)
    limits = measure_limits(Cpu(), SMALL)

    assert limits.bandwidth is None
    assert limits.reasons["bandwidth"].startswith("RuntimeError: can't allocate memory")
    assert limits.matmul["float32"] is not None
    assert limits.launch_latency_s is not None


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
    calls = []
    seconds = time_repeats(ToldCpu([9.0, 1.0, 2.0, 3.0]), lambda: calls.append(1), budget_s=2.5)

    assert seconds == [1.0, 2.0]
    assert len(calls) == 3


@pytest.mark.gpu
def test_a_gpu_has_figures_too() -> None:
    extent = EXTENTS["cuda"]._replace(sizes=(4096,), array_bytes=(2**30,))
    limits = measure_limits(Cuda(), extent)

    assert limits.bandwidth is not None, limits.reasons
    assert limits.matmul["bfloat16"].flops_per_s > limits.matmul["float32"].flops_per_s
    assert 1e-7 < limits.launch_latency_s < 1e-3
