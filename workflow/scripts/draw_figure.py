"""Draw one figure from tables that exist."""

import argparse
import sys
from pathlib import Path

import _source_tree  # noqa: F401
from dpprof import catalogue
from dpprof.analysis.frames import read_table
from dpprof.validation import InputError


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--figure", required=True, help="which: " + ", ".join(catalogue.names("figures"))
    )
    parser.add_argument("--tables", type=Path, required=True, help="the folder of the CSV tables")
    parser.add_argument(
        "--output", type=Path, action="append", required=True, help="a .png, .pdf or .svg to write"
    )
    arguments = parser.parse_args()
    try:
        catalogue.check("figures", arguments.figure, "--figure")
        experiments = read_table(arguments.tables / "experiments.csv")
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
    figure = catalogue.load("figures", arguments.figure)(experiments)
    for output in arguments.output:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)


if __name__ == "__main__":
    main()
