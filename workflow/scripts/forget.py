"""Forget results, so that the next snakemake runs those experiments again."""

import argparse
import sys
from pathlib import Path

import _source_tree  # noqa: F401
from dpprof.result import OUTCOMES, Result, read_result
from dpprof.sealed import ResultError
from dpprof.sources import code_digest
from dpprof.validation import one_of

FAILURES = OUTCOMES[1:]


def outcomes(text: str) -> list[str]:
    """Read a comma-separated list of ways to fail."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FAILURES:
            raise argparse.ArgumentTypeError(f"{name!r} is not allowed; {one_of(FAILURES, name)}")
    return names


def is_outdated(result: Result) -> bool:
    """Tell whether other code than the present measured a result."""
    return result.code_digest != code_digest(result.instrument, result.experiment)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--outcome",
        type=outcomes,
        default=[],
        help="forget failures: comma-separated, of " + ", ".join(FAILURES),
    )
    parser.add_argument(
        "--outdated",
        action="store_true",
        help="forget what other code than the present measured, for example during an edit",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be forgotten")
    arguments = parser.parse_args()
    if not arguments.outcome and not arguments.outdated:
        parser.error("say what to forget: --outcome, --outdated or both")
    forgotten, damaged = 0, 0
    for path in sorted(Path("results").glob("*/*.r*.json")):
        try:
            result = read_result(path)
        except ResultError as error:
            print(f"warning: {error}", file=sys.stderr)
            damaged += 1
            continue
        if result.outcome in arguments.outcome or (arguments.outdated and is_outdated(result)):
            print(f"{path}  {result.outcome}")
            forgotten += 1
            if not arguments.dry_run:
                path.unlink()
    done = "would be forgotten" if arguments.dry_run else "forgotten"
    print(f"{forgotten} results {done}; the next snakemake measures them again", file=sys.stderr)
    sys.exit(1 if damaged else 0)


if __name__ == "__main__":
    main()
