"""Draw one figure from tables that exist."""

import argparse
import sys
from pathlib import Path

import _source_tree  # noqa: F401
from dpprof import catalogue
from dpprof.analysis.frames import TableFolder
from dpprof.analysis.verified import find_marks
from dpprof.figures.marks import MEANINGS, mark_methods
from dpprof.figures.style import NothingToDrawError, say_nothing_to_draw
from dpprof.report.document import Drawing
from dpprof.storage import write_atomically
from dpprof.validation import InputError


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--figure", required=True, help="which: " + ", ".join(catalogue.names("figures"))
    )
    parser.add_argument("--tables", type=Path, required=True, help="the folder of the CSV tables")
    parser.add_argument(
        "--output",
        type=Path,
        action="append",
        required=True,
        help="a .png, .pdf or .svg to write, or a .json for the caption",
    )
    arguments = parser.parse_args()
    try:
        catalogue.check("figures", arguments.figure, "--figure")
        draw = catalogue.load("figures", arguments.figure)
    except (InputError, catalogue.EntryPointError) as error:
        sys.exit(f"error: {error}")
    missing = None
    marked: dict[str, list[str]] = {}
    try:
        tables = TableFolder(arguments.tables)
        figure = draw(tables)
        marked = mark_methods(figure, find_marks(tables["verification"]))
    except NothingToDrawError as nothing:
        missing = str(nothing)
        figure = say_nothing_to_draw(f"Nothing to draw: {missing}.")
    except OSError as error:
        sys.exit(f"error: {error}")
    caption = catalogue.caption("figures", arguments.figure)
    for one, methods in marked.items():
        caption += f" {one} {MEANINGS[one]}: {', '.join(methods)}."
    drawing = Drawing(name=arguments.figure, caption=caption, missing=missing)
    for output in arguments.output:
        if output.suffix == ".json":
            write_atomically(output, drawing.model_dump_json() + "\n")
        else:
            output.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(output)


if __name__ == "__main__":
    main()
