"""Times of configurations outlive the process that took them."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="the extra dpprof[triton] is not installed")

ARGUMENTS = 13
"""Positional arguments after the pointers."""


class Driver:
    """What tuning asks of a driver, on a machine without a GPU."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def program(monkeypatch, tmp_path):
    """A program that is tuned, but launched nowhere."""
    from dpprof.private.norms.triton_kernels import sum_gram_squares  # noqa: PLC0415 (it imports triton)

    if not hasattr(sum_gram_squares, "best_config"):
        sum_gram_squares.best_config = None
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(vars(triton.runtime.driver), "_active", Driver())
    monkeypatch.setattr(sum_gram_squares.fn, "run", lambda *_, **__: None)
    monkeypatch.setattr(sum_gram_squares, "cache", {})
    monkeypatch.setattr(sum_gram_squares, "best_config", None)
    return sum_gram_squares


def launch(program) -> None:
    tensor = torch.empty(2, 64, 128)
    program.run(
        *(tensor, tensor, torch.empty(2)),
        *[64] * ARGUMENTS,
        PRECISION="ieee",
        DESCRIBED=False,
        grid=(1,),
        warmup=False,
    )


def test_another_process_takes_the_choice_and_times_nothing(program, monkeypatch) -> None:
    timed = []

    def time_descending(_launch, quantiles):
        timed.append(quantiles)
        return [10.0 - len(timed)] * 3

    monkeypatch.setattr(program, "do_bench", time_descending)
    launch(program)
    chosen = program.best_config
    count = len(timed)
    assert count > 1

    program.cache.clear()  # all that a process keeps for itself
    program.best_config = SimpleNamespace()
    launch(program)
    assert len(timed) == count
    assert str(program.best_config) == str(chosen)
