"""The command ``dpprof``: a subcommand for each thing that works without Snakemake."""

import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from dpprof.experiments.config.validation import one_of
from dpprof.system.console import printable

COMMANDS: Mapping[str, str] = {
    "profile": "measure one experiment in a process of its own",
    "estimate": "predict one experiment, for this machine or for a GPU that is not here",
    "advise": "say which batch fits on a GPU, and which private method to use there",
    "targets": "list the GPUs that predictions are for, with their limits",
    "fits": "say which models can be trained privately on a GPU, and what that costs",
    "budget": "say what a privacy budget costs in noise, GPU hours and money",
    "explain": "say why one run needs more memory than another, to the byte",
    "compare": "say what got worse from one folder of results to another",
    "verify": "prove that a method computes the reference's clipped gradient",
    "audit": "find a lower bound on the epsilon of a private training of your own",
    "ceilings": "measure what a device can do at most",
    "tables": "write tables of results",
    "figure": "draw one figure of tables",
    "report": "write the report of tables and figures",
    "watch": "write the report for a browser, again and again while a sweep runs",
    "forget": "delete results, so that they are measured again",
    "prune": "list or delete results that no config asks for",
}
"""Subcommands, each a module that is imported only when it runs."""

QUESTIONS = ("advise", "budget", "compare", "estimate", "explain", "fits", "verify")
"""Subcommands whose modules are those of their questions; others lie beside this one."""

EXTRAS: Mapping[str, str] = {"figure": "report", "report": "report", "watch": "report"}
"""Subcommands that need more than the package alone, and the extra that has it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand; end in silence where the reader of its output has enough, as head does."""
    try:
        try:
            _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _run(words: Sequence[str]) -> None:
    match words:
        case ["--version"]:
            print(f"dpprof {version('dpprof')}{_tell_commit()}")
        case [] | ["-h" | "--help"]:
            print(usage())
            sys.exit(0 if words else 2)
        case [name, *rest] if name in COMMANDS:
            import_command(name).main(rest)
        case [name, *_]:
            why = f"{name[:80]!a} is not allowed; {one_of(COMMANDS, name)}"
            print(printable(f"dpprof: error: {why}"), file=sys.stderr)
            sys.exit(2)


def _tell_commit() -> str:
    """Return what a checkout holds now; its version is that of the commit that was installed."""
    from dpprof.experiments.records.provenance import describe_git  # noqa: PLC0415 (needs psutil)

    git = describe_git()
    edited = ", edited" if git["dirty"] else ""
    return "" if git["commit"] is None else f" (commit {git['commit'][:9]}{edited})"


def import_command(name: str) -> Any:
    """Return a subcommand's module; end the process where an extra is missing."""
    try:
        folder = "" if name in QUESTIONS else "commands."
        return importlib.import_module(f"dpprof.ask.{folder}{name}")
    except ModuleNotFoundError as error:
        if name not in EXTRAS:
            raise
        why = f"{error.name} is not installed; pip install 'dpprof[{EXTRAS[name]}]'"
        print(f"dpprof {name}: error: {why}", file=sys.stderr)
        sys.exit(1)


def usage() -> str:
    """Return the list of subcommands."""
    width = max(map(len, COMMANDS))
    lines = ["usage: dpprof COMMAND [options]", "", "Profile private training. Commands:", ""]
    lines += [f"  {name:{width}}  {about}" for name, about in COMMANDS.items()]
    return "\n".join([*lines, "", "dpprof COMMAND --help lists a command's options."])
