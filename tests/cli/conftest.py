"""Capacities that several commands are asked about."""

import pytest
from scripts import ASKED, HERE, call


@pytest.fixture(scope="session")
def asked(tmp_path_factory):
    """Ask for two methods once; what follows finds the capacities there."""
    path = tmp_path_factory.mktemp("asked")
    done = call("advise", *ASKED, *HERE, "--json=advice.json", cwd=path)
    assert done.returncode == 0, done.stderr
    (path / "said").write_text(done.stdout)
    return path
