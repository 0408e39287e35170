"""What tests of clipping share: the ways of flat clipping, and a seed.

Torch is imported late: pytest loads this file before the settings of threads are made.
"""

import os
from pathlib import Path

import pytest
from products import thin


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin(items, Path(__file__).parent)


@pytest.fixture(params=["FlashClipping", "BookKeeping"])
def way(request):
    """A way of flat clipping; a module that clips by layer too has a ``way`` of its own."""
    import dpprof.private  # noqa: PLC0415

    return getattr(dpprof.private, request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    import torch  # noqa: PLC0415

    torch.default_generator.manual_seed(0)  # torch.manual_seed takes milliseconds


@pytest.fixture(autouse=True)
def graphs_everywhere(monkeypatch):
    """Capture every private loop, if the variable asks for it: as on a GPU."""
    if not os.environ.get("DPPROF_TEST_GRAPHS"):
        yield
        return
    from simulated_graphs import simulated_graphs  # noqa: PLC0415

    with simulated_graphs(monkeypatch):
        yield
