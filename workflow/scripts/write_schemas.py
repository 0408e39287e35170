"""Write the schemas and the key tables of config/README.md from the models."""

from pathlib import Path

import _source_tree  # noqa: F401
from dpprof.records.schemas import generated_files
from dpprof.system.files import write_if_changed


def main() -> None:
    """Run from the command line."""
    for path, text in generated_files(Path(__file__).resolve().parents[2]).items():
        print(f"{path}: {'written' if write_if_changed(path, text) else 'up to date'}")


if __name__ == "__main__":
    main()
