"""Forget results, so that the next snakemake runs those experiments again."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dpprof.ask.commands.common import Parser, ending_in_a_sentence, names_of
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning.artifacts import RESULTS, RUN, VERDICT, RecordKind
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import interrupted_path
from dpprof.experiments.records.terms import OUTCOMES
from dpprof.system.console import printable

FAILURES = OUTCOMES[1:]
FORGOTTEN = (RUN, VERDICT)


def why_to_forget(path: Path, kind: RecordKind, arguments: argparse.Namespace) -> str | None:
    """Return why a file is to be forgotten; None where it stays.

    Raises:
        ResultError: The file cannot be trusted.
        InputError: It names a method or a model that is not installed, so its code is unknown.
    """
    record = kind.read(path)
    if kind is RUN:
        why = record.outcome
        if why in arguments.outcome:
            return str(why)
    else:
        why = "verdict"
        if arguments.unverified and not record.passed:
            return "failed verification" if record.passed is False else "not verified"
    outdated = arguments.outdated and kind.code_of(record).digest() != record.code_digest
    return why if outdated else None


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser("forget", __doc__)
    parser.add_argument(
        "--outcome",
        type=names_of(FAILURES),
        default=[],
        help="forget failures: comma-separated, of " + ", ".join(FAILURES),
    )
    parser.add_argument(
        "--unverified", action="store_true", help="forget verdicts on methods that did not pass"
    )
    parser.add_argument(
        "--outdated",
        action="store_true",
        help="forget results of other code than the present, for example during an edit",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be forgotten")
    arguments = parser.parse_args(argv)
    if not (arguments.outcome or arguments.unverified or arguments.outdated):
        parser.error("say what to forget: --outcome, --unverified, --outdated or several")
    forgotten, damaged = 0, 0
    with ending_in_a_sentence():
        kinds = {path: kind for kind in FORGOTTEN for path in RESULTS.glob(f"{kind.pattern}.json")}
        for path in sorted(kinds):
            try:
                why = why_to_forget(path, kinds[path], arguments)
            except (ResultError, InputError) as error:
                problem = error if isinstance(error, ResultError) else f"{path}: stays; {error}"
                print(f"warning: {printable(str(problem))}", file=sys.stderr)
                damaged += 1
                continue
            if why is not None:
                print(f"{path}  {why}")
                forgotten += 1
                if not arguments.dry_run:
                    path.unlink()
                    interrupted_path(path).unlink(missing_ok=True)
    done = "would be forgotten" if arguments.dry_run else "forgotten"
    print(f"{forgotten} results {done}; the next snakemake measures them again", file=sys.stderr)
    sys.exit(1 if damaged else 0)
