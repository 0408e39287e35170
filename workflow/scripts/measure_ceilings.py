"""Measure what a device can do at most, and leave one JSON file."""

import _source_tree  # noqa: F401
from dpprof.cli.ceilings import main

if __name__ == "__main__":
    main()
