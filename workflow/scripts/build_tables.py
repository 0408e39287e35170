"""Read the results that a manifest lists and write tidy CSV tables."""

import argparse
import sys
from pathlib import Path

import _source_tree  # noqa: F401
from dpprof.analysis.collection import collect
from dpprof.analysis.tables import build_tables
from dpprof.planning import read_manifest
from dpprof.sealed import ResultError
from dpprof.storage import write_atomically
from dpprof.validation import InputError


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="the list of runs to tabulate")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the tables go")
    parser.add_argument(
        "--ceilings", type=Path, nargs="*", default=[], help="ceilings of devices to tabulate"
    )
    parser.add_argument(
        "--partial", action="store_true", help="leave out runs without a result, and list them"
    )
    arguments = parser.parse_args()
    try:
        manifest = read_manifest(arguments.manifest)
        # The manifest lies in results/plan, beside the results that it lists.
        root = arguments.manifest.resolve().parents[2]
        collected = collect(manifest, root, partial=arguments.partial, ceilings=arguments.ceilings)
    except (InputError, ResultError, OSError) as error:
        sys.exit(f"error: {error}")
    for name, table in build_tables(collected).items():
        write_atomically(arguments.output_dir / f"{name}.csv", table.to_csv(index=False))
    write_atomically(arguments.output_dir / "manifest.txt", f"{arguments.manifest.name}\n")


if __name__ == "__main__":
    main()
