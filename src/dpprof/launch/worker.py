"""The worker process of an experiment: runs one instrument and reports the result.

The supervisor calls ``work`` in a child process. The worker returns a report unless its process
dies; then the supervisor judges it by how the process ended.
"""

from dpprof.launch.measuring import lift_memory_limit, run
from dpprof.launch.protocol import PhaseMark, WorkerAnswer
from dpprof.launch.ranks_run import run_ranks
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import PREDICTIONS, why_unsupported


def work(spec: str, instrument: str, phase_fd: int) -> WorkerAnswer:
    """Run an experiment, given as JSON, and return its report to the supervisor."""
    experiment = Experiment.model_validate_json(spec)
    needs_ranks = experiment.parallel is not None and instrument not in PREDICTIONS
    if needs_ranks and why_unsupported(experiment, instrument) is None:
        return run_ranks(experiment, instrument, phase_fd)
    report = run(experiment, instrument, PhaseMark(phase_fd))
    lift_memory_limit()
    return report
