"""Compares what two processors answer."""

from typing import Any

import pytest


def assert_same(found: Any, expected: Any) -> None:
    """Compare whole numbers, text and structure exactly, and other numbers to 1e-9."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9)
    else:
        assert found == expected
