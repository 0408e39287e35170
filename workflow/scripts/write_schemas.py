"""Write schemas, key tables and the page of table columns from what declares them."""

from pathlib import Path

import subcommand  # noqa: F401
from dpprof.experiments.records.schemas import generated_files
from dpprof.results.analysis.tables.columns import TABLES
from dpprof.results.analysis.tables.table import write_page
from dpprof.system.files import write_if_changed


def main() -> None:
    """Run from the command line."""
    root = Path(__file__).resolve().parents[2]
    files = generated_files(root) | {root / "docs" / "numbers" / "tables.md": write_page(TABLES)}
    for path, text in files.items():
        print(f"{path}: {'written' if write_if_changed(path, text) else 'up to date'}")


if __name__ == "__main__":
    main()
