"""The search of a value that spends a budget."""

import math

import pytest

from dpprof.private.accounting.search import BeyondReachError, find_least

CURVES = {
    "a power": lambda value: 5 * value**-1.5,
    "steeper where noise is little": lambda value: math.exp(3 / value) - 1,
    "infinite below one": lambda value: math.inf if value < 1 else 7 / value,
    "nothing beyond two": lambda value: 0.0 if value > 2 else 4 - value,
    "in steps": lambda value: 10 / math.ceil(value),
}


@pytest.mark.parametrize("guess", [0.02, 1.0, 300.0])
@pytest.mark.parametrize("name", ["a power", "steeper where noise is little", "infinite below one"])
def test_what_is_found_spends_the_budget_up_to_the_tolerance(name, guess) -> None:
    calls = []

    def spent(value: float) -> float:
        calls.append(value)
        try:
            return CURVES[name](value)
        except OverflowError:
            return math.inf

    found = spent(find_least(spent, 2.0, 0.01, guess))

    assert 1.99 <= found <= 2
    assert len(calls) < 30


def test_a_good_guess_takes_few_calls() -> None:
    calls = []

    def spent(value: float) -> float:
        calls.append(value)
        return CURVES["a power"](value)

    find_least(spent, 2.0, 0.01, 1.05 * (5 / 2) ** (1 / 1.5))

    assert len(calls) <= 3


@pytest.mark.parametrize("name", ["nothing beyond two", "in steps"])
def test_where_it_jumps_the_least_value_that_does_not_spend_more_is_found(name) -> None:
    spent = CURVES[name]
    found = find_least(spent, 1.9, 0.01, 1.0)

    assert spent(found) <= 1.9 < spent(found * (1 - 1e-9))


def test_the_largest_value_is_tried_before_giving_up() -> None:
    assert find_least(lambda value: 10 / value, 1.0, 0.01, 1.0, most=10) == 10
    with pytest.raises(BeyondReachError, match=r"^9 still spends 1\.11$"):
        find_least(lambda value: 10 / value, 1.0, 0.01, 1.0, most=9)


def test_a_budget_that_hardly_any_noise_spends_is_beyond_reach() -> None:
    with pytest.raises(BeyondReachError, match=r"spends only 1$"):
        find_least(lambda _: 1.0, 5.0, 0.01, 1.0)
