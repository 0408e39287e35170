"""Speeds of products between measured shapes."""

import numpy as np
import pytest

from dpprof.predict.step_time.product_table import (
    UNIT,
    PeakRates,
    ProductTable,
    bound_s,
    read_document,
    read_product_table,
)

SIZES = [2**power for power in range(6, 13)]
MORE_ROWS, MOST = 0.03, SIZES[-1]
SPREADS = {"measured at this shape": 0.01, "interpolated": 0.02, "extrapolated": 0.04}
PEAKS = PeakRates(1e12, 1e11)


def make(law) -> ProductTable:
    """Build a table of shares that follow a law of m, n and k."""
    shares = [[[round(UNIT * law(m, n, k)) for k in SIZES] for n in SIZES] for m in SIZES]
    spreads = {"spreads": SPREADS, "more_rows_spread": MORE_ROWS}
    return ProductTable(dict.fromkeys("mnk", SIZES) | {"shares": shares} | spreads)


def law(m, n, k) -> float:
    return 0.001 * m**0.3 * n**0.2 * k**0.25


def test_a_bound_is_of_flops_or_of_bytes() -> None:
    by_flops = bound_s((1, 1000, 1000, 1000), 2, PEAKS)
    by_bytes = bound_s((3, 1, 1000, 1000), 2, PEAKS)

    assert by_flops == 2e9 / 1e12
    assert by_bytes == 3 * 2 * (1000 + 1000_000 + 1000) / 1e11


def test_a_measured_shape_takes_its_own_time() -> None:
    found = make(law).predict((1, 64, 128, 256), 2, PEAKS)

    share = round(UNIT * law(64, 128, 256)) / UNIT
    assert found.seconds == pytest.approx(2 * 64 * 128 * 256 / 1e12 / share)
    assert (found.basis, found.spread) == ("measured at this shape", 0.01)


@pytest.mark.parametrize("shape", [(100, 300, 700), (3000, 70, 90), (65, 4000, 1111)])
def test_a_law_of_powers_is_found_again_between_shapes(shape) -> None:
    share, spread, basis = make(law).find(*shape)

    assert share == pytest.approx(law(*shape), rel=0.02)
    assert (basis, spread) == ("interpolated", 0.02)


@pytest.mark.parametrize(
    ("shape", "edge", "expected"),
    [
        ((300, 2 * MOST, 300), (300, MOST, 300), 0.08),
        ((300, 64 * MOST, 300), (300, MOST, 300), 0.08),
        # More rows keep their share, and the spread that was measured of that.
        ((32 * MOST, 300, 300), (MOST, 300, 300), MORE_ROWS),
        ((2 * MOST, 2 * MOST, 300), (MOST, MOST, 300), 0.08),
        ((32, 300, 300), (64, 300, 300), 0.08),  # fewer rows are another thing
    ],
)
def test_beyond_the_table_its_edge_counts_and_the_spread_grows(shape, edge, expected) -> None:
    share, spread, basis = make(law).find(*shape)

    assert share == pytest.approx(make(law).find(*edge)[0], rel=1e-9)
    assert (basis, spread) == ("extrapolated", pytest.approx(expected))


def test_a_batch_is_as_fast_as_its_rows_in_one_product() -> None:
    table = make(law)
    one, batch = table.predict((1, 512, 64, 64), 2, PEAKS), table.predict((8, 64, 64, 64), 2, PEAKS)

    assert batch.basis == "interpolated"
    ratio = bound_s((8, 64, 64, 64), 2, PEAKS) / bound_s((1, 512, 64, 64), 2, PEAKS)
    assert batch.seconds / one.seconds == pytest.approx(ratio)


def test_a_product_without_elements_takes_no_time() -> None:
    assert make(law).predict((1, 64, 64, 0), 2, PEAKS).seconds == 0


def test_shapes_that_were_not_measured_are_left_out() -> None:
    table = make(lambda m, _n, _k: 0.0 if m == 64 else 0.5)

    assert table.shapes[:, 0].min() == 128
    assert table.find(64, 64, 64)[2] == "extrapolated"


TABLES = [
    pytest.param(name, marks=() if name in {"h100", "l40s"} else pytest.mark.slow)
    for name in ("a100", "b200", "h100", "h200", "l40s")
]


def draw(rows: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).choice(rows, 100, replace=False)


@pytest.mark.parametrize("name", ["a100", "b200", "h100", "h200", "l40s"])
def test_a_table_that_ships_says_where_it_is_from_and_has_plausible_shares(name) -> None:
    document, table = read_document(name), read_product_table(name)
    large = (table.shapes >= 512).all(axis=1)

    assert document["source"].startswith("aiconfigurator-core 0.12.0: systems/data/")
    assert "Apache-2.0" in document["license"]
    assert table.shares.min() > 0
    assert table.shares[large].max() < 1  # no cache holds these


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_ships_predicts_what_it_left_out(name) -> None:
    document, table = read_document(name), read_product_table(name)
    errors = []
    for at in draw(np.flatnonzero((table.shapes >= 512).all(axis=1))):
        usable = np.arange(len(table.shapes)) != at
        found = table.fit(table.shapes[at].tolist(), usable)
        errors.append(abs(np.log(found / table.shares[at])))

    assert np.median(errors) < 0.06
    assert np.mean(np.asarray(errors) < 1.645 * document["spreads"]["interpolated"]) > 0.8


@pytest.mark.parametrize("name", TABLES)
def test_the_most_rows_of_a_table_are_found_from_a_quarter_of_them(name) -> None:
    document, table = read_document(name), read_product_table(name)
    most, spread = document["m"][-1], document["more_rows_spread"]
    kept = [at for at, m in enumerate(document["m"]) if 4 * m <= most]
    short = {key: [document[key][at] for at in kept] for key in ("m", "shares")}
    shorter = ProductTable(document | short)

    errors = []
    for at in draw(np.flatnonzero(table.shapes[:, 0] == most)):
        share, *rest = shorter.find(*map(int, table.shapes[at]))
        errors.append(abs(np.log(share / table.shares[at])))
        assert rest == [spread, "extrapolated"]
    assert np.mean(np.asarray(errors) < 1.645 * spread) > 0.8
