"""The price of mechanisms, from figures that are given."""

import pytest
from factory import PRIVACY, make_capacity, make_experiment, make_noise, write_synthetic

from dpprof.ask.mechanisms import PricedMechanisms
from dpprof.experiments.accounting.plan import NoiseOfMechanism
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.advice.mechanisms import exceed_memory, price_mechanisms

ONE = PRIVACY.model_copy(update={"epsilon": [8.0]})


def result(folder, strategy="independent", step_s=1.0, gpus=1, **capacity):
    ranks = f"kind=fsdp,world_size={gpus}" if gpus > 1 else None
    experiment = make_experiment(
        method="flash-bk",
        seq_len=8,
        device="cuda",
        target="h200",
        parallel=ranks,
        noise_strategy=strategy,
    )
    recorded = make_capacity(step_s, **capacity)
    return write_synthetic(folder, experiment, instrument="capacity", recorded=recorded)


def noise_of(mechanism, times=1.0, batch=64):
    noises = {f"{name}_noise": times for name in ("step", "sum", "momentum")}
    return NoiseOfMechanism(
        mechanism=mechanism, noise_multiplier=0.5, accountant="rdp", batch_size=batch, **noises
    )


def price(results, *planned):
    priced = price_mechanisms(results, ONE, make_noise(8.0), planned, Standing(True, None))
    return PricedMechanisms(priced), priced.mechanisms


def test_hours_are_those_of_the_batch_with_equal_noise(tmp_path) -> None:
    results = {1: result(tmp_path), 4: result(tmp_path, "banded-4", step_s=2.0)}
    told, (plain, banded, bisr) = price(
        results,
        noise_of("independent"),
        noise_of("banded-4", 0.5, batch=16),
        noise_of("bisr-4", 0.6, batch=32),
    )

    # A batch of 8 takes 0.8 s and the update 0.2 s; with four bands twice that, 100 times.
    assert plain.gpu_hours == pytest.approx(100 * (64 / 8 * 0.8 + 0.2) / 3600)
    assert banded.gpu_hours == pytest.approx(100 * (16 / 8 * 1.6 + 0.4) / 3600)
    assert bisr.gpu_hours == pytest.approx(100 * (32 / 8 * 1.6 + 0.4) / 3600)
    assert banded.same_batch_gpu_hours == pytest.approx(100 * (64 / 8 * 1.6 + 0.4) / 3600)
    assert banded.hours_ratio == pytest.approx(3.6 / 6.6)
    assert banded.price == pytest.approx(2 * banded.gpu_hours)
    # Ten numbers of float32 for each band but one.
    assert [cost.buffers_bytes for cost in (plain, banded, bisr)] == [0, 120, 120]
    assert told.fits
    assert told.sentence == (
        "banded-4: 0.100 GPU hours (0.0909 to 0.110 at 90 %), price 0.20, 0.55 times the 0.183 of "
        "independent noise, with as much noise in the sum over steps (flash-bk, float32, adamw)."
    )


def test_past_noise_larger_than_the_memory_needs_no_prediction(tmp_path) -> None:
    alone = result(tmp_path, budget_bytes=1000)

    assert [exceed_memory(alone, bands) for bands in (26, 27)] == [False, True]
    assert not exceed_memory(result(tmp_path, gpus=2, budget_bytes=1000), 27)
    told, [_, large] = price({1: alone}, noise_of("independent"), noise_of("banded-27"))
    assert (large.gpu_hours, large.safe_batch_size) == (None, None)
    assert large.message.startswith("its past noise is more than the GPU's memory")
    assert "banded-27: its past noise" in told.details


def test_a_mechanism_without_noise_says_why_on_a_screen(tmp_path) -> None:
    unknown = NoiseOfMechanism(mechanism="banded-64", reason="64 folds are too few")
    results = {1: result(tmp_path), 64: result(tmp_path, "banded-64")}
    told, [_, cost] = price(results, noise_of("independent"), unknown)

    assert (cost.gpu_hours, cost.message) == (None, "64 folds are too few")
    lines = str(told).splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 100
    assert "banded-64: 64 folds are too few" in told.details


def test_without_a_time_no_hours_are_known(tmp_path) -> None:
    told, _ = price({1: result(tmp_path, step_s=None)}, noise_of("independent"))

    assert told.sentence == "No hours are known of flash-bk."
