"""List files in results/ that none of the given configs asks for; --delete deletes them."""

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
        help="configs whose results to keep (default, for listing: config/config.yaml)",
    )
    parser.add_argument(
        "--delete", action="store_true", help="delete instead of listing; needs configs by name"
    )
    arguments = parser.parse_args()
    if arguments.delete and not arguments.configs:
        parser.error("--delete: name every config whose results to keep")
    configs = arguments.configs or [Path("config/config.yaml")]
    try:
        plans = [make_plan(yaml.safe_load(path.read_text()) or {}) for path in configs]
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
