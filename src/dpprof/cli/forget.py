"""Forget results, so that the next snakemake runs those experiments again."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dpprof.cli.common import Parser, ending_in_a_sentence
from dpprof.planning.code_digest import code_digest, verdict_digest
from dpprof.records.record import ResultError, read_record
from dpprof.records.result import read_result
from dpprof.records.terms import OUTCOMES
from dpprof.records.verdict import SCHEMA_VERSION, VERDICTS, Verdict
from dpprof.spec.validation import one_of
from dpprof.system.console import printable

FAILURES = OUTCOMES[1:]


def outcomes(text: str) -> list[str]:
    """Read a comma-separated list of ways to fail."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FAILURES:
            raise argparse.ArgumentTypeError(f"{name!r} is not allowed; {one_of(FAILURES, name)}")
    return names


def what_to_forget(path: Path, arguments: argparse.Namespace) -> str | None:
    """Say what a file tells that is to be forgotten; None where it stays.

    Raises:
        ResultError: The file cannot be trusted.
    """
    if path.parent.name == VERDICTS:
        verdict = read_record(path, Verdict, SCHEMA_VERSION)
        if arguments.unverified and not verdict.passed:
            return "failed verification" if verdict.passed is False else "not verified"
        present = arguments.outdated and verdict_digest(verdict.model, verdict.method)
        told, digest = "verdict", verdict.code_digest
    else:
        result = read_result(path)
        if result.outcome in arguments.outcome:
            return result.outcome
        present = arguments.outdated and code_digest(result.instrument, result.experiment)
        told, digest = result.outcome, result.code_digest
    return told if present and present != digest else None


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser(prog="dpprof forget", description=__doc__)
    parser.add_argument(
        "--outcome",
        type=outcomes,
        default=[],
        help="forget failures: comma-separated, of " + ", ".join(FAILURES),
    )
    parser.add_argument(
        "--unverified", action="store_true", help="forget verdicts on methods that did not pass"
    )
    parser.add_argument(
        "--outdated",
        action="store_true",
        help="forget what other code than the present measured, for example during an edit",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be forgotten")
    arguments = parser.parse_args(argv)
    if not (arguments.outcome or arguments.unverified or arguments.outdated):
        parser.error("say what to forget: --outcome, --unverified, --outdated or several")
    forgotten, damaged = 0, 0
    results = Path("results")
    with ending_in_a_sentence():
        for path in sorted([*results.glob("*/*.r*.json"), *results.glob(f"{VERDICTS}/*.json")]):
            try:
                told = what_to_forget(path, arguments)
            except ResultError as error:
                print(f"warning: {printable(str(error))}", file=sys.stderr)
                damaged += 1
                continue
            if told is not None:
                print(f"{path}  {told}")
                forgotten += 1
                if not arguments.dry_run:
                    path.unlink()
    done = "would be forgotten" if arguments.dry_run else "forgotten"
    print(f"{forgotten} results {done}; the next snakemake measures them again", file=sys.stderr)
    sys.exit(1 if damaged else 0)
