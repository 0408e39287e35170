"""Capacities that several commands are asked about."""

import pytest
from factory import make_capacity, write_synthetic
from scripts import ASKED, HERE, call

from dpprof.cli.capacities import make_parser, read_capacity_options
from dpprof.planning.code_digest import code_digest

STEP_S = {"standard": 1.0, "flash-bk": 1.5}


@pytest.fixture(scope="session")
def asked(tmp_path_factory):
    """Ask for two methods once, of which the present code has found the capacities."""
    path = tmp_path_factory.mktemp("asked")
    for experiment in read_capacity_options(make_parser("advise", "").parse_args([*ASKED, *HERE])):
        sizes = {"budget_bytes": 25 * 2**20, "unfragmented_batch_size": 12, "safe_share": None}
        found = make_capacity(STEP_S[experiment.method], **sizes)
        digest = code_digest("capacity", experiment)
        write_synthetic(path, experiment, instrument="capacity", recorded=found, code_digest=digest)
    for verdict in (path / "results" / "verify").iterdir():
        verdict.unlink()
    done = call("advise", *ASKED, *HERE, "--json=advice.json", cwd=path)
    assert done.returncode == 0, done.stderr
    (path / "said").write_text(done.stdout)
    return path
