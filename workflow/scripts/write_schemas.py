"""Write schemas, key tables and the lists of tables and columns from what declares them."""

from pathlib import Path

import subcommand  # noqa: F401
from dpprof.experiments.records.schemas import generated_files
from dpprof.results.analysis.tables.columns import TABLES
from dpprof.results.analysis.tables.table import list_columns, write_page
from dpprof.system.files import write_if_changed


def main() -> None:
    """Run from the command line."""
    root = Path(__file__).resolve().parents[2]
    numbers = root / "docs" / "numbers"
    files = generated_files(root) | {
        numbers / "tables.md": write_page(TABLES),
        numbers / "data" / "columns.csv": list_columns(TABLES),
    }
    for path, text in files.items():
        print(f"{path}: {'written' if write_if_changed(path, text) else 'up to date'}")


if __name__ == "__main__":
    main()
