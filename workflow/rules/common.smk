"""Planning, and the functions that rules look their inputs up with."""

import functools
import inspect
import shlex
from collections import Counter
from pathlib import Path

from snakemake.exceptions import WorkflowError

from dpprof.results.analysis.tables.columns import TABLES
from dpprof.experiments.launch import progress
from dpprof.experiments.planning import artifacts, job_resources, planner
from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import ID_PATTERN, read_spec
from dpprof.experiments.planning.job_environment import (
    expect_environment,
    offer_interpreter,
    why_jobs_cannot_run,
)
from dpprof.experiments.config.validation import InputError
from dpprof.system.console import say
from dpprof.experiments.records.verdict import BUILT_IN, STAND_IN_PATTERN, is_stand_in

# Jobs on other machines parse this file too, and look for their own machine's Python.
try:
    offer_interpreter()
except InputError as error:
    raise WorkflowError(str(error)) from None

# Whether every rule has an environment or a container of its own.
IS_DEPLOYED = bool(workflow.deployment_settings.deployment_method)

# Whether results are not in ./results, but in a storage or where a module's prefix says.
IS_STORED = workflow.storage_settings.default_storage_provider is not None
IS_ELSEWHERE = IS_STORED or workflow.modifier.modify_path("results") != "results"

PLAN = None

# Jobs on other machines parse this file again, but must not plan: whatever the config
# says by then, they run what was planned. Without a common file system they find no plan,
# and make it from the sources and the config that Snakemake has sent them.
if workflow.is_main_process or not artifacts.PLAN.is_dir():
    try:
        if IS_DEPLOYED and workflow.is_main_process:
            expect_environment(HERE / "envs" / "dpprof.yaml")
        PLAN = planner.make_plan(config)
        planner.write_plan(PLAN, elsewhere=IS_ELSEWHERE)
    except (InputError, OSError) as error:
        raise WorkflowError(str(error)) from None
    if IS_ELSEWHERE and PLAN.config.partial:
        raise WorkflowError(
            "partial=true reports on what is in ./results; leave it out with a storage provider "
            "or a module's prefix, which keep results elsewhere"
        )

FIGURES = registry.names("figures")
MEASUREMENTS = [
    name for name in registry.names("instruments") if name not in registry.PREDICTIONS
]
PARTIAL = "--partial" if PLAN and PLAN.config.partial else ""


wildcard_constraints:
    id=ID_PATTERN,
    replicate=r"[0-9]+",
    figure=r"[a-z0-9][a-z0-9-]*",
    device=r"(cpu|cuda)[a-z0-9-]*",
    # Both may hold hyphens, so only their names tell where one ends.
    model="|".join([BUILT_IN, *registry.names("models"), STAND_IN_PATTERN]),
    method="|".join(registry.names("methods")),


localrules:
    all,
    tables,
    figure,
    report,


onstart:
    start_progress()


def script_of(command):
    """Name the script of a command; where only the rules are here, the installed dpprof."""
    path = HERE / "workflow" / "scripts" / "subcommand.py"
    script = shlex.quote(str(path)) if path.is_file() else "-P -m dpprof"
    return f"{script} {command}"


def plan_file(path):
    """Say that a file of the plan is on this disk, whatever storage results are kept in."""
    return local(str(path))


@functools.lru_cache(maxsize=None)
def experiment_of(experiment_id):
    """Return an experiment, which is all that a rule may look at, as it was planned."""
    if PLAN is not None and experiment_id in PLAN.experiments:
        return PLAN.experiments[experiment_id]
    return read_spec(artifacts.spec_path(experiment_id))


def code_of(wildcards):
    """Name the digest of the code that measures this experiment.

    Without a spec, name that: Snakemake says in a sentence which file is missing.
    """
    try:
        experiment = experiment_of(wildcards.id)
    except FileNotFoundError:
        return plan_file(artifacts.spec_path(wildcards.id))
    return plan_file(artifacts.code_of_run(wildcards.instrument, experiment).path)


def stand_in_of(wildcards):
    """Name the file of the small model that stands for a Hugging Face model; else nothing."""
    stands = is_stand_in(wildcards.model)
    return [plan_file(artifacts.stand_in_path(wildcards.model))] if stands else []


gpu_limit = workflow.global_resources.get("gpu")
GPUS = job_resources.gpus_at_once(gpu_limit and gpu_limit.value)


def is_on_gpu(wildcards):
    """Say whether an experiment runs on a GPU."""
    return experiment_of(wildcards.id).device == "cuda"


def gpus_of(wildcards):
    """Ask for a GPU for each rank where the experiment runs on GPUs; here for those there are."""
    if not is_on_gpu(wildcards):
        return 0
    ranks = experiment_of(wildcards.id).world_size
    return ranks if is_on_cluster() else min(ranks, GPUS)


def is_on_cluster():
    """Say whether jobs run on other machines, whose GPUs and cores are not known here."""
    return workflow.remote_exec or workflow.non_local_exec


def threads_of(wildcards):
    """Let nothing run beside a measurement but those on other GPUs."""
    if is_on_cluster() or not is_on_gpu(wildcards):
        return workflow.cores
    return gpus_of(wildcards) * max(1, workflow.cores // GPUS)


def device_options(wildcards, threads):
    """Say where a measurement computes, and with how many threads.

    On this machine's own processor --cores says only what Snakemake may use, and the results are to
    be the same whatever it says.
    """
    return f"--threads {threads}" if is_on_cluster() or is_on_gpu(wildcards) else ""


def memory_mb_of(wildcards):
    """Say how much memory a measurement may need on its host."""
    return job_resources.host_memory_mb(experiment_of(wildcards.id))


def runtime_of(wildcards):
    """Say within how many minutes a run ends in any case."""
    return job_resources.runtime_minutes(experiment_of(wildcards.id))


def priority_of(wildcards):
    """Run all of replicate 0, then all of replicate 1: what drifts hits every method."""
    return max(0, 1000 - int(wildcards.replicate))


def planned(kind):
    """Make a function that lists the current config's records of one kind."""
    return lambda wildcards: [str(path) for path in PLAN.paths(kind)]


def required(kind):
    """Make a function that lists the records that must be there: none with partial=true."""
    return lambda wildcards: [] if PLAN.config.partial else planned(kind)(wildcards)


def kind_of_device(wildcards):
    """Say what a device is, which its name begins with: cpu or cuda."""
    return wildcards.device.partition("-")[0]


def predicted_on(wildcards):
    """List the specs whose operators are timed: what is predicted for this processor."""
    if PLAN is None or kind_of_device(wildcards) != "cpu":
        return []
    return [plan_file(artifacts.spec_path(name)) for name in PLAN.predicted_here]


def operators_of(wildcards):
    """Name the file of the operators that a prediction for this processor rests on.

    Only the process that schedules needs it, and a newer file makes no prediction out of date.
    """
    if PLAN is None or is_on_gpu(wildcards):
        return []
    return [ancient(str(artifacts.ceilings_of(planner.name_here("cpu")).path))]


def folder_of(files):
    """Name the folder of files, which a storage keeps in another place."""
    return str(Path(files[0]).parent)


# Snakemake asks for the signature of a function each time before it calls it; one that is
# stored need not be worked out ten times a job.
for function in (
    *(code_of, operators_of, priority_of, threads_of, device_options),
    *(gpus_of, memory_mb_of, runtime_of),
):
    function.__signature__ = inspect.signature(function)


RUNS = {"profile": "measurement", "predict": "prediction"}
"""Rules that make results, with the part of a sweep that each is."""


def start_progress():
    """Say what is to do, and list the runs to come, for the processes that announce them."""
    if PLAN is None:
        return
    due = list(workflow.dag.needrun_jobs())
    parts = Counter(RUNS.get(job.rule.name, job.rule.name) for job in due)
    problem = None if IS_DEPLOYED or is_on_cluster() else why_jobs_cannot_run()
    if problem and parts.keys() & {*RUNS.values(), "verify", "ceilings"}:
        raise WorkflowError(problem)
    for line in progress.tell_to_do(parts, workflow.cores):
        say(line)
    runs = [
        (progress.run_name(w.id, w.instrument, int(w.replicate)), experiment_of(w.id))
        for w in (job.wildcards for job in due if job.rule.name in RUNS)
    ]
    progress.Progress.start(artifacts.PLAN / "progress.jsonl", runs)
