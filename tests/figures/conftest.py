"""Tables that many figures are drawn of."""

import pytest
from drawing import tables_of


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    return tables_of(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="session")
def crashed(tmp_path_factory):
    return tables_of(tmp_path_factory.mktemp("crashed"), outcome="crashed")


@pytest.fixture(scope="session")
def of_one_size(tmp_path_factory):
    return tables_of(tmp_path_factory.mktemp("one"), batch_sizes=[2], seq_lens=[4])
