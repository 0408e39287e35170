"""Products of parameters, of which a part is tested by default."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
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


def thin(items: Iterable[pytest.Item], folder: Path) -> None:
    """Mark most cases of a function of several parameters as slow, if none of them is so already.

    The others hold every value of each parameter, and every pair of values but of the two
    parameters that have most. A case that is asked for by its name alone stays.
    """
    cases_of = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.path.parent == folder:
            cases_of[item.nodeid.partition("[")[0]].append(item)
    for cases in cases_of.values():
        factors = [list(dict.fromkeys(ids)) for ids in zip(*map(_ids, cases), strict=True)]
        *_, second, _ = [1, 1, *sorted(map(len, factors))]
        if any("slow" in item.keywords for item in cases):
            continue
        for item in cases:
            places = map(list.index, factors, _ids(item))
            if sum(places) % second:
                item.add_marker(pytest.mark.slow)


def _ids(item: Any) -> list[str]:
    """Return how pytest calls the values of a case, one for each parametrization."""
    return item.callspec._idlist
