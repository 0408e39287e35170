"""Measure one experiment in a process of its own and leave one JSON file.

The experiment is either a spec file (``--spec``) or given by options; every option of
an experiment is a key of the config file. The exit status is 0 whenever the JSON was
written, out of memory and crashes included: what came of the experiment is in it. It is
75 where the wait for a device was too long, and 1 after any other error.
"""

from collections.abc import Sequence

from dpprof.ask.commands.common import Parser, ending_in_a_sentence, natural, path, positive
from dpprof.ask.commands.options import add_experiment_options, read_experiment
from dpprof.experiments.config import registry
from dpprof.experiments.launch.device_lock import MAX_WAIT, longest_wait_s
from dpprof.experiments.launch.progress import Progress, run_name, tell_result
from dpprof.experiments.launch.supervisor import supervise
from dpprof.experiments.planning.job_resources import WAIT_UNDER_A_SCHEDULER_S
from dpprof.system.console import keep_log
from dpprof.system.files import check_writable


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser("profile", __doc__)
    parser.add_argument("--spec", type=path, help="spec file, instead of the options below")
    parser.add_argument("--instrument", default="clean", help="what watches (default: clean)")
    parser.add_argument("--replicate", type=natural, default=0, help="number of the repetition")
    parser.add_argument("--output", type=path, required=True, help="the result file to write")
    parser.add_argument("--log", type=path, help="where the worker's output goes (default: here)")
    parser.add_argument(
        "--traces", type=path, help="folder for traces (default: beside OUTPUT, NAME.traces)"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="measure nothing where OUTPUT is this run's complete result by the present code",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        help="threads of a measurement that does not say --cpu-threads, at most one for each core"
        " (default: one for each core)",
    )
    parser.add_argument(
        "--max-wait-s",
        metavar="SECONDS",
        help=f"longest wait for a device (default: {MAX_WAIT}, else "
        f"{WAIT_UNDER_A_SCHEDULER_S:,.0f} in a job of Slurm, else without a limit)",
    )
    add_experiment_options(parser)
    arguments = parser.parse_args(argv)
    keep_log(None)  # the supervisor keeps it
    with ending_in_a_sentence():
        experiment = read_experiment(arguments)
        longest_s = longest_wait_s(arguments.max_wait_s)
        registry.check("instruments", arguments.instrument, "--instrument")
        registry.refuse_target(experiment, arguments.instrument, "--target")
    name = run_name(experiment.id, arguments.instrument, arguments.replicate)
    progress = Progress.current()
    if progress is not None:
        progress.announce(name)
    with ending_in_a_sentence("no result was written"):
        check_writable(arguments.output)
        result = supervise(
            experiment,
            arguments.instrument,
            arguments.replicate,
            arguments.output,
            arguments.log,
            traces=arguments.traces or arguments.output.with_suffix(".traces"),
            keep=arguments.keep,
            threads=arguments.threads,
            longest_wait_s=longest_s,
            since_s=progress.sweep.at_s if progress and progress.sweep else 0.0,
        )
    if progress is not None:
        progress.conclude(name, result)
    tell_result(result)
