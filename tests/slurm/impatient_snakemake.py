"""Snakemake that asks Slurm for its jobs' states every second, and not ever more rarely."""

import sys

from snakemake.cli import main
from snakemake_executor_plugin_slurm import Executor

Executor.next_seconds_between_status_checks = property(
    lambda _executor: 1, lambda _executor, _seconds: None
)
main(sys.argv[1:])
