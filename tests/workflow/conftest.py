"""A copy of the checkout in which real snakemake runs."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from checkout import Checkout, quick_checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A fresh checkout in which nothing trains: what runs when depends on nothing measured."""
    return quick_checkout(tmp_path / "checkout")


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the micro sweep once, for all processes that share the tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / "finished"
    with (folder / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            quick_checkout(folder / "begun").snakemake()
            (folder / "begun").rename(path)
    return path


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Checkout:
    """A checkout whose micro sweep has been run, ages of files included."""
    shutil.copytree(_finished, tmp_path / "checkout")
    return Checkout(tmp_path / "checkout")
