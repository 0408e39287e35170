"""Tables that many figures are drawn of, and the figures."""

import functools

import pytest
from drawing import draw, tables_of


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    return tables_of(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="session")
def drawn(full):
    """Figures by name, each drawn once; tests leave them as they are."""
    return functools.cache(lambda name: draw(name, full))


@pytest.fixture(scope="session")
def crashed(tmp_path_factory):
    return tables_of(tmp_path_factory.mktemp("crashed"), outcome="crashed")


@pytest.fixture(scope="session")
def of_one_size(tmp_path_factory):
    return tables_of(tmp_path_factory.mktemp("one"), batch_sizes=[2], seq_lens=[4])
