"""Write the report from tables and figures that exist."""

import argparse
import sys
from pathlib import Path

import _source_tree  # noqa: F401
from dpprof import catalogue
from dpprof.analysis.frames import TableFolder
from dpprof.report.content import build_document
from dpprof.report.document import Drawing
from dpprof.report.latex import LatexError
from dpprof.report.render import ROUTES, write_report


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, required=True, help="the folder of the CSV tables")
    parser.add_argument(
        "--output-dir",
        type=Path,
        required=True,
        help="where the report goes; its figures are in the folder figures in it",
    )
    parser.add_argument(
        "--pdf",
        choices=["auto", *ROUTES],
        default="auto",
        help="what makes the PDF: latex (latexmk), typst, or auto: latex where it is installed",
    )
    arguments = parser.parse_args()
    try:
        paths = (
            arguments.output_dir / "figures" / f"{name}.json" for name in catalogue.names("figures")
        )
        drawings = [
            Drawing.model_validate_json(path.read_text(encoding="utf-8"))
            for path in paths
            if path.is_file()
        ]
        document = build_document(TableFolder(arguments.tables), drawings)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    try:
        write_report(document, arguments.output_dir, arguments.pdf)
    except LatexError as error:
        sys.exit(f"error: --pdf latex: {error}")


if __name__ == "__main__":
    main()
