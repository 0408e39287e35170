"""Forget recorded failures, so that the next snakemake runs those experiments again."""

import argparse
import sys
from pathlib import Path

import _source_tree  # noqa: F401
from dpprof.result import OUTCOMES, ResultError, read_result
from dpprof.validation import one_of

FAILURES = OUTCOMES[1:]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--outcome",
        required=True,
        help="comma-separated outcomes to forget: " + ", ".join(FAILURES),
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be forgotten")
    arguments = parser.parse_args()
    wanted = [name.strip() for name in arguments.outcome.split(",")]
    for name in wanted:
        if name not in FAILURES:
            sys.exit(f"error: --outcome: {name!r} is not allowed; {one_of(FAILURES, name)}")
    forgotten, damaged = 0, 0
    for path in sorted(Path("results").glob("*/*.r*.json")):
        try:
            outcome = read_result(path).outcome
        except ResultError as error:
            print(f"warning: {error}", file=sys.stderr)
            damaged += 1
            continue
        if outcome in wanted:
            print(f"{path}  {outcome}")
            forgotten += 1
            if not arguments.dry_run:
                path.unlink()
    done = "would be forgotten" if arguments.dry_run else "forgotten"
    print(f"{forgotten} results {done}; the next snakemake measures them again", file=sys.stderr)
    sys.exit(1 if damaged else 0)


if __name__ == "__main__":
    main()
