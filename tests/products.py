"""Products of parameters, of which a part is tested by default."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def one_in(
    count: int, *factors: Iterable[Any], unless: Callable[..., bool] = lambda *_: False
) -> list[Any]:
    """Multiply factors, and mark all but one in so many cases as slow.

    The others hold every value of each factor, and every pair of values of two factors if there is
    a third that has at least ``count`` values. ``unless`` leaves cases out.
    """
    cases = itertools.product(*(enumerate(factor) for factor in factors))
    found = []
    for case in cases:
        values = [value for _, value in case]
        marks = () if sum(at for at, _ in case) % count == 0 else pytest.mark.slow
        if not unless(*values):
            found.append(pytest.param(*values, marks=marks))
    return found
