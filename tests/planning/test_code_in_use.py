"""A digest is that of the code that ran, or of none, whoever edits what and when."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from children import refuse, wait_for

from dpprof.experiments.launch.device_lock import hold_one
from dpprof.experiments.launch.device_slots import cpu_slot
from dpprof.experiments.launch.isolated import isolate
from dpprof.experiments.planning import code_digest


class Run:
    """A run that waits for the processor; texts stand for a supervisor's and a method's files."""

    def __init__(self) -> None:
        self.texts = {"supervisor": "old", "method": "old"}

    def digest(self) -> str:
        return " ".join(self.texts.values())

    def supervise(self, edited: str | None) -> str:
        """Run, edit a file meanwhile, and return the digest that the record would have."""
        with isolate(None, [cpu_slot(1)], self.digest, __file__) as isolation:
            isolation.begin()
            if edited is not None:
                self.texts[edited] = "new"
            return isolation.finish()["code_digest"]


@pytest.fixture
def run(monkeypatch) -> Run:
    made = Run()
    monkeypatch.setattr(code_digest, "file_digest", lambda _: made.texts["supervisor"])
    return made


def edit_while_it_waits(run: Run, edited: str, capsys) -> str:
    with ThreadPoolExecutor() as pool:
        with hold_one([["cpu"]], refuse):
            waits = pool.submit(run.supervise, None)
            wait_for(lambda: "waiting" in capsys.readouterr().err)
            run.texts[edited] = "new"
        return waits.result(timeout=60)


def test_code_that_nobody_edits_is_recorded_as_it_is(run) -> None:
    assert run.supervise(None) == "old old"


def test_a_method_edited_while_waiting_is_recorded_as_edited(run, capsys) -> None:
    """The worker, which imports it, has not begun."""
    assert edit_while_it_waits(run, "method", capsys) == "old new"


def test_a_supervisor_edited_while_it_waits_is_neither_the_old_nor_the_new(run, capsys) -> None:
    assert edit_while_it_waits(run, "supervisor", capsys) not in {"old old", "new old"}


@pytest.mark.parametrize("edited", ["method", "supervisor"])
def test_code_edited_while_it_runs_is_recorded_as_no_code_there_ever_was(
    run, capsys, edited
) -> None:
    before = run.digest()

    assert run.supervise(edited) not in {before, run.digest()}
    assert "counts as outdated" in capsys.readouterr().err
