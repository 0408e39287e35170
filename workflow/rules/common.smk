"""Planning, and the functions that rules look their inputs up with."""

import functools
import inspect
from collections import Counter
from pathlib import Path

from snakemake.exceptions import WorkflowError

from dpprof.analysis.table_columns import TABLES
from dpprof.launch import progress
from dpprof.launch.to_do import tell_to_do
from dpprof.planning import artifacts, planner
from dpprof.spec import registry
from dpprof.spec.experiment import ID_PATTERN, read_spec
from dpprof.planning.interpreter import offer_interpreter
from dpprof.spec.validation import InputError
from dpprof.system.console import say
from dpprof.records.verdict import BUILT_IN, STAND_IN_PATTERN, is_stand_in

# Jobs on other machines parse this file too, and look for their own machine's Python.
try:
    offer_interpreter()
except InputError as error:
    raise WorkflowError(str(error)) from None

PLAN = None

# Jobs on other machines parse this file again, but must not plan: whatever the config
# says by then, they run what was planned.
if workflow.is_main_process:
    try:
        PLAN = planner.make_plan(config)
        planner.write_plan(PLAN)
    except (InputError, OSError) as error:
        raise WorkflowError(str(error)) from None

FIGURES = registry.names("figures")
PARTIAL = "--partial" if PLAN and PLAN.config.partial else ""


wildcard_constraints:
    id=ID_PATTERN,
    instrument=r"[a-z0-9][a-z0-9-]*",
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


@functools.lru_cache(maxsize=None)
def experiment_of(experiment_id):
    """Return an experiment, which is all that a profile rule may look at, as it was planned."""
    if PLAN is not None and experiment_id in PLAN.experiments:
        return PLAN.experiments[experiment_id]
    return read_spec(artifacts.spec_path(experiment_id))


def code_of(wildcards):
    """Name the digest of the code that measures this experiment."""
    experiment = experiment_of(wildcards.id)
    return str(artifacts.code_of_run(wildcards.instrument, experiment).path)


def code_of_verdict(wildcards):
    """Name the digest of the code that a verdict rests on."""
    return str(artifacts.code_of_verdict(wildcards.model, wildcards.method).path)


def stand_in_of(wildcards):
    """Name the file of the small model that stands for a Hugging Face model; else nothing."""
    stands = is_stand_in(wildcards.model)
    return [str(artifacts.stand_in_path(wildcards.model))] if stands else []


def gpus_of(wildcards):
    """Ask for a GPU where the experiment runs on one; predictions run on none."""
    on_gpu = experiment_of(wildcards.id).device == "cuda"
    return 1 if on_gpu and wildcards.instrument not in registry.PREDICTIONS else 0


def threads_of(wildcards):
    """Let nothing run beside a measurement; predictions may run beside one another."""
    return 1 if wildcards.instrument in registry.PREDICTIONS else workflow.cores


def priority_of(wildcards):
    """Run all of replicate 0, then all of replicate 1: what drifts hits every method."""
    return max(0, 1000 - int(wildcards.replicate))


def manifest_of(wildcards):
    """Name the list of runs of the current config."""
    return str(PLAN.manifest.path)


def due_of(wildcards):
    """Name the file that planning rewrites when tables must be made again."""
    return str(PLAN.manifest.due_path)


def planned(kind):
    """Make a function that lists the current config's records of one kind."""
    return lambda wildcards: [str(path) for path in PLAN.paths(kind)]


def required(kind):
    """The same for what must be there: nothing with partial=true, so that nothing runs."""
    return lambda wildcards: [] if PLAN.config.partial else planned(kind)(wildcards)


def kind_of_device(wildcards):
    """Say what a device is, which its name begins with: cpu or cuda."""
    return wildcards.device.partition("-")[0]


def gpus_of_device(wildcards):
    """Ask for a GPU where the ceilings are a GPU's."""
    return 1 if kind_of_device(wildcards) == "cuda" else 0


def predicted_on(wildcards):
    """List the specs whose operators are timed: what is predicted for this processor."""
    if PLAN is None or kind_of_device(wildcards) != "cpu":
        return []
    return [str(artifacts.spec_path(one)) for one in PLAN.predicted_here]


def operators_of(wildcards):
    """Name the file of the operators that a prediction for this processor rests on.

    Only the process that schedules needs it, and a newer file makes no prediction out of date.
    """
    is_prediction = wildcards.instrument in registry.PREDICTIONS
    if PLAN is None or not is_prediction or experiment_of(wildcards.id).device != "cpu":
        return []
    return [ancient(str(artifacts.ceilings_of(planner.name_here("cpu")).path))]


# Snakemake asks for the signature of a function each time before it calls it; one that is
# stored need not be worked out ten times a job.
for function in (code_of, operators_of, gpus_of, threads_of, priority_of):
    function.__signature__ = inspect.signature(function)


def caption_of(wildcards):
    """Say what a figure shows."""
    return registry.caption("figures", wildcards.figure)


def part_of(job):
    """Name the part of the sweep that a job is of."""
    if job.rule.name != "profile":
        return job.rule.name
    is_prediction = job.wildcards.instrument in registry.PREDICTIONS
    return "prediction" if is_prediction else "measurement"


def start_progress():
    """Say what is to do, and list the runs to come, for the processes that announce them."""
    if PLAN is None:
        return
    due = list(workflow.dag.needrun_jobs())
    for line in tell_to_do(Counter(map(part_of, due)), workflow.cores):
        say(line)
    jobs = [job for job in due if job.rule.name == "profile"]
    progress.Progress.start(
        artifacts.PLAN / "progress.jsonl",
        [
            (
                progress.run_name(w.id, w.instrument, int(w.replicate)),
                experiment_of(w.id),
            )
            for w in (job.wildcards for job in jobs)
        ],
    )
