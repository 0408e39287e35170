"""Write the report from tables and figures that exist."""

import argparse
import inspect
import sys
from pathlib import Path

import _source_tree  # noqa: F401
from dpprof import catalogue
from dpprof.analysis.frames import read_table
from dpprof.report.content import build_document
from dpprof.report.render import write_report

TABLES = (
    *("runs", "experiments", "outcomes", "phases", "components"),
    *("samplers", "findings", "missing"),
)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, required=True, help="the folder of the CSV tables")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the report goes")
    arguments = parser.parse_args()
    try:
        tables = {name: read_table(arguments.tables / f"{name}.csv") for name in TABLES}
    except OSError as error:
        sys.exit(f"error: {error}")
    captions = {
        name: caption_of(name)
        for name in catalogue.names("figures")
        if (arguments.output_dir / "figures" / f"{name}.pdf").is_file()
    }
    write_report(build_document(tables, captions), arguments.output_dir)


def caption_of(figure: str) -> str:
    """Take a figure's caption from the docstring of the function that draws it."""
    text = inspect.getdoc(catalogue.load("figures", figure)) or figure
    return text.partition("\nArgs:")[0].strip()


if __name__ == "__main__":
    main()
