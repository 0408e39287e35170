"""Capacities that several commands are asked about."""

import pytest
from factory import make_capacity, write_synthetic
from scripts import ASKED, HERE, call

from dpprof.ask.advise import list_questions, read_options
from dpprof.ask.commands.capacities import read_question
from dpprof.experiments.planning.code_digest import code_digest
from dpprof.experiments.records import answers

STEP_S = {"standard": 1.0, "flash-bk": 1.5}


def make_found(experiment):
    """Make the capacity of a method."""
    sizes = {"budget_bytes": 25 * 2**20, "unfragmented_batch_size": 12, "safe_share": None}
    return make_capacity(STEP_S[experiment.method], **sizes)


@pytest.fixture(scope="session")
def keep_capacities():
    """Write a capacity, as found by the present code, for each experiment of options of advise."""

    def keep(path, options, recorded_of) -> None:
        asked = read_question(read_options(options)) | {"again": None}
        fields = {k: v for k, v in asked.items() if v is not None}
        for experiment in list_questions(fields, fields.pop("methods")):
            digest, found = code_digest("capacity", experiment), recorded_of(experiment)
            told = {"recorded": found} if found else {"outcome": "oom", "message": "too large"}
            write_synthetic(path, experiment, instrument="capacity", code_digest=digest, **told)
        for verdict in (path / "results" / "verify").iterdir():
            verdict.unlink()

    return keep


@pytest.fixture(scope="module", autouse=True)
def without_kept():
    """Take no answers and no verdicts from the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "kept_answers", dict)
        yield


@pytest.fixture(scope="session")
def asked(tmp_path_factory, keep_capacities):
    """Ask for two methods once, of which the present code has found the capacities."""
    path = tmp_path_factory.mktemp("asked")
    keep_capacities(path, [*ASKED, *HERE], make_found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "kept_answers", dict)
        done = call("advise", *ASKED, *HERE, "--json=advice.json", cwd=path)
    assert done.returncode == 0, done.stderr
    (path / "said").write_text(done.stdout)
    return path
