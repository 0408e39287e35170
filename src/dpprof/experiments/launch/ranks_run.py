"""Runs an experiment on several ranks, a process each, and makes one report of theirs.

The worker becomes their parent and runs none itself. Ranks belong to its process group, so they end
with it. Where one rank fails, the others would wait for it: they are ended, and the report says
which rank failed, and how.
"""

import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from typing import IO, NamedTuple

from pydantic import ValidationError

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.launch import child
from dpprof.experiments.launch.worker_report import PhaseMark, WorkerAnswer, judge_death
from dpprof.experiments.records.result import Measurement, RankPart
from dpprof.system.child_output import Output, Sink

_WORK = "dpprof.experiments.launch.worker:work_on_rank"
_POLL_S = 0.02
_COUNTED_ELSEWHERE = "the instruments memory and estimate count it"


class _Rank(NamedTuple):
    """A process of a rank, and the files that it shares with this one."""

    number: int
    process: subprocess.Popen[bytes]
    output: Output
    phase_fd: int
    answer: IO[bytes]

    def report(self) -> WorkerAnswer | None:
        """Return the rank's report; None if it died before the report was complete."""
        self.answer.seek(0)
        try:
            return WorkerAnswer.model_validate_json(self.answer.read())
        except ValidationError:
            return None

    def measurement(self) -> Measurement | None:
        """Return what the rank has measured; None if it failed."""
        report = self.report()
        return None if report is None else report.measurement

    def reported_at(self) -> float:
        """Return when the rank reported; 0 if it died without a report."""
        return os.fstat(self.answer.fileno()).st_mtime if self.report() else 0.0


def run_ranks(experiment: Experiment, instrument: str, phase_fd: int) -> WorkerAnswer:
    """Run an experiment on all its ranks; rank 0 marks its phases in the file of ``phase_fd``.

    Returns:
        A report whose measurement is rank 0's, with every rank's part; or of the rank that failed.
    """
    ranks: list[_Rank] = []
    with ExitStack() as files:

        def make_file() -> IO[bytes]:
            """Make a file without a name, which disappears even if this process is killed."""
            return files.enter_context(tempfile.TemporaryFile())

        store_fd = make_file().fileno()
        try:
            for number in range(experiment.world_size):
                own_fd = make_file().fileno() if number else phase_fd
                fds = (own_fd, store_fd)
                ranks.append(_start(experiment, instrument, number, fds, make_file()))
            failed = _wait(ranks)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()
        tails = [rank.output.finish() for rank in ranks]
        if failed is not None:
            return _tell_failure(failed, tails[failed.number], experiment)
        return _merge([measured for rank in ranks if (measured := rank.measurement())])


def _start(
    experiment: Experiment, instrument: str, number: int, fds: tuple[int, int], answer: IO[bytes]
) -> _Rank:
    """Start a rank; ``fds`` are the files of its phase, and by which ranks find each other."""
    phase_fd, store_fd = fds
    assignment = child.Assignment(
        function=_WORK,
        arguments=[experiment.model_dump_json(), instrument, phase_fd, number, store_fd],
        parent_pid=os.getpid(),
        lock_fds=[],
        answer_fd=answer.fileno(),
    )
    environment = dict(os.environ)
    for name in environment.keys() & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}:  # ranks share them
        environment[name] = str(max(1, int(environment[name]) // experiment.world_size))
    process, printed = child.start(assignment, fds, environment, new_session=False)
    return _Rank(number, process, Output(printed, Sink(None)), phase_fd, answer)


def _wait(ranks: list[_Rank]) -> _Rank | None:
    """Wait until all ranks have reported ok, or one has failed; returns that one.

    A rank that waits for a dead one fails too, with an error of communication. So a rank that died
    without a report comes first, then the one that reported first.
    """
    waiting = list(ranks)
    while waiting:
        time.sleep(_POLL_S)
        ended = [rank for rank in waiting if rank.process.poll() is not None]
        if not all(rank.measurement() for rank in ended):
            # Looked at once more: the first one may have died after its turn and before another's.
            ended = [rank for rank in waiting if rank.process.poll() is not None]
            failed = [rank for rank in ended if not rank.measurement()]
            return min(failed, key=_Rank.reported_at)
        waiting = [rank for rank in waiting if rank not in ended]
    return None


def _tell_failure(rank: _Rank, tail: str, experiment: Experiment) -> WorkerAnswer:
    report = rank.report()
    if report is None:
        limited = experiment.memory_limit_bytes is not None
        phase = PhaseMark(rank.phase_fd).read()
        outcome, error = judge_death(rank.process.returncode, phase, tail, limited=limited)
        report = WorkerAnswer(outcome=outcome, error=error)
    assert report.error is not None
    told = {"rank": rank.number, "message": f"rank {rank.number}: {report.error.message}"}
    return report.model_copy(update={"error": report.error.model_copy(update=told)})


def _merge(measured: list[Measurement]) -> WorkerAnswer:
    names = [name for name in RankPart.model_fields if name != "rank"]
    parts = [
        RankPart(rank=rank, **{name: getattr(measurement, name) for name in names})
        for rank, measurement in enumerate(measured)
    ]
    first = measured[0]
    reasons = dict(first.reasons)
    if first.communication is None:
        reasons["communication"] = _COUNTED_ELSEWHERE
    whole = first.model_copy(update={"ranks": parts, "reasons": reasons})
    return WorkerAnswer(outcome="ok", measurement=whole)
