"""A copy of the checkout in which real snakemake runs."""

import shutil
from pathlib import Path

import pytest
from checkout import Checkout, copy_checkout, quick_checkout


@pytest.fixture
def training(tmp_path: Path) -> Checkout:
    """A fresh checkout whose default config is the micro sweep."""
    return copy_checkout(tmp_path / "checkout")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """The same, but no experiment trains: what runs when does not depend on what is measured."""
    return quick_checkout(tmp_path / "checkout")


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = quick_checkout(tmp_path_factory.mktemp("finished") / "checkout")
    done.snakemake()
    return done.path


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Checkout:
    """A checkout whose micro sweep has been run, ages of files included."""
    shutil.copytree(_finished, tmp_path / "checkout")
    return Checkout(tmp_path / "checkout")
