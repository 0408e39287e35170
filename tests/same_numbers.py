"""Compares what two processors answer."""

from typing import Any

import pytest


def assert_same(found: Any, expected: Any) -> None:
    """Compare whole numbers and text exactly, and other numbers to 1e-9."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            assert_same(found[key], one)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9)
    else:
        assert found == expected
