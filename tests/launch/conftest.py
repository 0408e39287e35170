"""Fixtures of the tests of runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dpprof.experiments.config import registry

PLUGIN = Path(__file__).parents[1] / "plugin"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install another package's instruments and methods, here and in processes that are started."""
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    monkeypatch.syspath_prepend(PLUGIN)
    registry._entries.cache_clear()
    yield
    registry._entries.cache_clear()
