"""The command ``dpprof``: a subcommand for each thing that works without Snakemake."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from dpprof.spec.validation import one_of
from dpprof.system.console import printable

COMMANDS: Mapping[str, str] = {
    "profile": "measure one experiment in a process of its own",
    "estimate": "predict one experiment, for this machine or for a GPU that is not here",
    "capacity": "find the largest batch that fits, for every method",
    "advise": "say which private method to use on a GPU",
    "verify": "prove that a method computes the reference's clipped gradient",
    "ceilings": "measure what a device can do at most",
    "tables": "write tables of results",
    "figure": "draw one figure of tables",
    "report": "write the report of tables and figures",
    "forget": "delete results, so that they are measured again",
    "prune": "list or delete results that no config asks for",
}
"""Subcommands, each a module of this package that is imported only where it is asked for."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand.

    Args:
        argv: The command line without the program's name; None for that of this process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    match given:
        case ["--version"]:
            print(f"dpprof {version('dpprof')}")
        case [] | ["-h" | "--help"]:
            print(usage())
            sys.exit(0 if given else 2)
        case [name, *rest] if name in COMMANDS:
            importlib.import_module(f"dpprof.cli.{name}").main(rest)
        case [name, *_]:
            told = f"{name[:80]!a} is not allowed; {one_of(COMMANDS, name)}"
            print(printable(f"dpprof: error: {told}"), file=sys.stderr)
            sys.exit(2)


def usage() -> str:
    """Return the list of subcommands."""
    width = max(map(len, COMMANDS))
    lines = ["usage: dpprof COMMAND [options]", "", "Profile private training. Commands:", ""]
    lines += [f"  {name:{width}}  {about}" for name, about in COMMANDS.items()]
    return "\n".join([*lines, "", "dpprof COMMAND --help lists a command's options."])
