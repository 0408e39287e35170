"""Find files in results/ that no given config asks for; delete them with --delete."""

import argparse
import sys
from pathlib import Path

import yaml

import _source_tree  # noqa: F401
from dpprof.planning import files_beyond, make_plan
from dpprof.validation import InputError


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "configs",
        nargs="*",
        type=Path,
        default=[Path("config/config.yaml")],
        help="configs whose results to keep (default: config/config.yaml)",
    )
    parser.add_argument("--delete", action="store_true", help="delete instead of only listing")
    arguments = parser.parse_args()
    try:
        plans = [make_plan(yaml.safe_load(path.read_text()) or {}) for path in arguments.configs]
    except (InputError, OSError, yaml.YAMLError) as error:
        sys.exit(f"error: {error}")
    beyond = files_beyond(Path(), plans)
    for path in beyond:
        print(path)
        if arguments.delete:
            path.unlink()
    done = "deleted" if arguments.delete else "would be deleted; add --delete to do it"
    print(f"{len(beyond)} files {done}", file=sys.stderr)


if __name__ == "__main__":
    main()
