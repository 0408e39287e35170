"""Runs an experiment in a worker process, with lock, limits and retries, and writes one JSON.

It imports no torch, so it starts fast, and a crash of a measurement does not affect it.
"""

import datetime as dt
import pkgutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.registry import PREDICTIONS, is_lent
from dpprof.experiments.launch import gpu_contention
from dpprof.experiments.launch.device_lock import scheduler_job
from dpprof.experiments.launch.device_slots import DeviceSlot, cpu_slot, gpu_slots
from dpprof.experiments.launch.forks import Forks
from dpprof.experiments.launch.isolated import Ended, Isolation, Terminated, isolate
from dpprof.experiments.launch.worker_report import TRACES, PhaseMark, WorkerAnswer, judge_death
from dpprof.experiments.planning.code_digest import code_digest, model_libraries
from dpprof.experiments.planning.job_resources import MAX_ATTEMPTS
from dpprof.experiments.records.provenance import package_versions
from dpprof.experiments.records.reconciliation import JOINED
from dpprof.experiments.records.record import ResultError, write_record
from dpprof.experiments.records.result import (
    Attempt,
    Failure,
    Measurement,
    Result,
    interrupted_path,
    read_result,
)
from dpprof.experiments.records.terms import Outcome, Phase
from dpprof.system.child_output import Sink
from dpprof.system.console import say
from dpprof.system.files import write_atomically
from dpprof.system.hardware import available_cores

_WORK = "dpprof.experiments.launch.worker:work"
_WORK_HERE = "dpprof.experiments.launch.worker:work_here"

_SIGNALS_SPREAD_S = 2.0
"""A scheduler signals every process of a job, the worker perhaps before its supervisor."""

RETRIED: tuple[Outcome, ...] = ("crashed", "killed")
"""A run that ends so is tried again in a fresh process, up to ``MAX_ATTEMPTS``; other outcomes are
final."""


def _slots(experiment: Experiment, instrument: str, threads: int | None) -> list[DeviceSlot]:
    """Return the interchangeable devices that this experiment can run on.

    Predictions run on the CPU, whatever device they are for, with the threads of a measurement that
    has the machine to itself; of several ranks, those of one.
    """
    cores = available_cores()
    if instrument in PREDICTIONS:
        number = max(1, (experiment.cpu_threads or cores) // experiment.world_size)
        return [cpu_slot(number, shared=True)]
    number = experiment.cpu_threads or min(threads or cores, cores)
    gpus = gpu_slots(number, experiment.world_size) if experiment.device == "cuda" else []
    return gpus or [cpu_slot(number)]  # too few GPUs: the worker says it


class _Run(NamedTuple):
    experiment: Experiment
    instrument: str
    replicate: int
    output: Path
    log_path: Path | None
    keep: bool


class _Tried(NamedTuple):
    attempt: Attempt
    measurement: Measurement | None = None
    terminated: Terminated | None = None
    """How a scheduler has ended this process meanwhile, if it has."""


def _attempt(isolation: Isolation, run: _Run, sink: Sink, forks: Forks | None) -> _Tried:
    """Run the experiment in a worker and judge how the worker ended.

    Other processes' use of the GPU is recorded before and after. With ``busy_gpu: refuse``
    nothing runs beside it.

    Raises:
        Terminated: This process is to end, and no scheduler has said so.
    """
    experiment, uuid = run.experiment, isolation.slot.uuid
    before, start = gpu_contention.look_at(uuid), time.monotonic()
    if experiment.busy_gpu == "refuse" and before.matter:
        refusal = gpu_contention.refuse_busy(before, experiment.wait_for_idle_gpu_s)
        return _Tried(
            Attempt(outcome="unsupported", error=refusal, wall_s=0.0, others_before=before)
        )
    with tempfile.TemporaryFile() as phase_file:
        mark = PhaseMark(phase_file.fileno())
        try:
            if is_lent(experiment.model):
                # Only this process can build it.
                answer = pkgutil.resolve_name(_WORK_HERE)(experiment, run.instrument, mark)
                ended = Ended(answer, 0, False, "", time.monotonic() - start, 0.0)
            else:
                ended = isolation.run(
                    WorkerAnswer,
                    _WORK,
                    *(experiment.model_dump_json(), run.instrument, phase_file.fileno()),
                    timeout_s=experiment.timeout_s,
                    sink=sink,
                    pass_fds=(phase_file.fileno(),),
                    forks=forks,
                )
            if ended.returncode == -signal.SIGTERM and scheduler_job():
                time.sleep(_SIGNALS_SPREAD_S)
        except Terminated as terminated:
            job, wall_s = scheduler_job(), time.monotonic() - start
            if job is None:
                raise
            error = _describe_end(job, terminated.number, mark.read())
            attempt = Attempt(outcome="killed", error=error, wall_s=wall_s, others_before=before)
            return _Tried(attempt, terminated=terminated)
        phase = mark.read()
    if uuid is not None:  # the driver's load includes the run for a moment more
        time.sleep(gpu_contention.SAMPLE_S)
    after = gpu_contention.look_at(uuid)
    outcome, failure = _judge(ended, experiment, phase)
    if failure is not None and outcome == "oom":
        failure = gpu_contention.tell_others(failure, before, after)
    attempt = Attempt(
        outcome=outcome,
        error=failure,
        wall_s=ended.wall_s,
        others_busy_cores=ended.others_busy_cores,
        others_before=before,
        others_after=after,
    )
    return _Tried(attempt, ended.answer.measurement if ended.answer else None)


def _describe_end(job: str, number: int, phase: Phase) -> Failure:
    return Failure(
        kind="Scheduler",
        message=f"the scheduler ended {job}: it was cancelled or preempted, or its time was over",
        phase=phase,
        signal=signal.Signals(number).name,
    )


def _judge(
    ended: Ended[WorkerAnswer], experiment: Experiment, phase: Phase
) -> tuple[Outcome, Failure | None]:
    """Return the outcome of a worker and its error: as it reports them, or by how it ended."""
    if ended.answer is not None:
        return ended.answer.outcome, ended.answer.error
    if ended.timed_out:
        message = f"ended after timeout_s = {experiment.timeout_s:g} s"
        return "timeout", Failure(kind="Timeout", message=message, phase=phase)
    limited = experiment.memory_limit_bytes is not None
    return judge_death(ended.returncode, phase, ended.output, limited=limited)


def supervise(
    experiment: Experiment,
    instrument: str,
    replicate: int,
    output: Path,
    log_path: Path | None = None,
    *,
    traces: Path | None = None,
    keep: bool = False,
    threads: int | None = None,
    longest_wait_s: float | None = None,
    since_s: float = 0.0,
    forks: Forks | None = None,
) -> Result:
    """Run one experiment until it ends in any way, and write one complete JSON.

    The clock starts when the device's lock is held. A run that crashed or was killed is tried once
    more. The result has every attempt.

    The worker's output goes to ``log_path``, or to standard error; an instrument's traces go to
    the folder ``traces``, if any. With ``keep``, an existing complete result of this run by the
    present code is returned: a process wrote it after its Snakemake was killed. If a scheduler has
    interrupted the run since ``since_s``, the sweep's beginning in seconds since 1970, its attempts
    count as the first ones.

    ``threads`` are those of a measurement whose experiment does not say ``cpu_threads``, at most
    and by default one for each core. ``longest_wait_s`` bounds the wait for the lock;
    ``DPPROF_MAX_WAIT_S`` where it is not given. ``forks`` starts workers of predictions.

    Raises:
        OSError: The result cannot be written; this is checked before the measurement.
        DeviceBusyError: No device became free in that time.
        Terminated: SIGTERM or SIGHUP has come. Under a scheduler the result is written all the
            same, with the outcome killed.
    """
    slots = _slots(experiment, instrument, threads)
    uuids = [slot.uuid for slot in slots]
    why_not = gpu_contention.judge_use(uuids, experiment.wait_for_idle_gpu_s, experiment.busy_gpu)
    digest = partial(code_digest, instrument, experiment)
    with (
        isolate(
            output, slots, digest, __file__, longest_s=longest_wait_s, why_not=why_not
        ) as isolation,
        closing(Sink(log_path)) as sink,
    ):
        asked = (experiment.digest, instrument, replicate)
        earlier = _read_earlier(output, asked, digest, since_s) if keep else None
        attempts = _tell_earlier(earlier, sink)
        if earlier and not _is_interrupted(earlier):
            say("this code has already measured this run; its result is kept")
            interrupted_path(output).unlink(missing_ok=True)
            return earlier
        isolation.begin(**{TRACES: "" if traces is None else str(traces)})
        run = _Run(experiment, instrument, replicate, output, log_path, keep)
        tried = _try(isolation, run, attempts, sink, forks)
        result = _write(run, tried.measurement, isolation.finish(), attempts)
        if tried.terminated:
            say("the scheduler has ended this job; the attempt is recorded")
            raise tried.terminated
    return result


def _is_interrupted(result: Result) -> bool:
    return result.outcome in RETRIED and len(result.attempts) < MAX_ATTEMPTS


def _read_earlier(
    output: Path, asked: tuple[str, str, int], digest: Callable[[], str], since_s: float
) -> Result | None:
    """Return the result of an earlier job, from its file or its copy; None if there is none.

    Snakemake deletes the result of a job that failed, and for a scheduler a job that it has ended
    has failed, whatever the job still did. So a copy of the result stays beside it until a job ends
    well. A copy that has no attempts left takes the place of the deleted result.

    ``asked`` is what the result must be of: spec digest, instrument and replicate; ``digest``
    returns the present code's. What was interrupted before ``since_s``, in seconds since 1970, does
    not count.
    """
    interrupted = None
    for path in (output, interrupted_path(output)):
        try:
            result = read_result(path)
        except (FileNotFoundError, ResultError):
            continue
        run = (result.spec_digest, result.instrument, result.replicate)
        if run != asked or result.code_digest != digest():
            continue
        is_final = not _is_interrupted(result)
        if path == output and is_final:
            return result
        if dt.datetime.fromisoformat(result.started_at).timestamp() < since_s:
            continue
        if is_final:
            path.replace(output)
            return result
        interrupted = interrupted or result
    return interrupted


def _tell_earlier(earlier: Result | None, sink: Sink) -> list[Attempt]:
    attempts = list(earlier.attempts) if earlier else []
    for number, attempt in enumerate(attempts, start=1):
        told = f": {attempt.error.message}" if attempt.error else ""
        sink.write(f"dpprof: earlier attempt {number}: {attempt.outcome}{told}\n")
    return attempts


def _try(
    isolation: Isolation, run: _Run, attempts: list[Attempt], sink: Sink, forks: Forks | None
) -> _Tried:
    """Attempt a run, once more after some outcomes; append the attempts and return the last one."""
    while True:
        sink.write(f"dpprof: {run.experiment.id} {run.instrument} r{run.replicate}\n")
        tried = _attempt(isolation, run, sink, forks)
        attempt = tried.attempt
        if attempt.error is not None and run.log_path is not None:
            error = attempt.error.model_copy(update={"log": str(run.log_path)})
            attempt = attempt.model_copy(update={"error": error})
        attempts.append(attempt)
        sink.write(f"dpprof: attempt {len(attempts)}: {attempt.outcome}\n")
        if tried.terminated or attempt.outcome not in RETRIED or len(attempts) >= MAX_ATTEMPTS:
            return tried


def _write(
    run: _Run, measurement: Measurement | None, facts: dict[str, Any], attempts: list[Attempt]
) -> Result:
    """Write a run's result, and a copy for the next job where a scheduler has interrupted it."""
    experiment = run.experiment
    facts["provenance"] |= {"seed": experiment.seed, "spec_digest": experiment.digest}
    facts["provenance"]["packages"] |= package_versions(model_libraries(experiment))
    measured = (measurement or Measurement()).model_dump()
    measured["reasons"] |= {"verification": JOINED}
    fields = {
        **measured,
        **facts,
        "experiment_id": experiment.id,
        "experiment": experiment,
        "spec_digest": experiment.digest,
        "instrument": run.instrument,
        "replicate": run.replicate,
        "outcome": attempts[-1].outcome,
        "error": attempts[-1].error,
        "attempts": attempts,
    }
    result = write_record(run.output, Result, fields)
    copy = interrupted_path(run.output)
    # For a scheduler a job has failed, too, whose worker was killed for its memory.
    if run.keep and scheduler_job() and result.outcome == "killed":
        write_atomically(copy, run.output.read_bytes())
    else:
        copy.unlink(missing_ok=True)
    return result
