"""Measure one experiment in a process of its own and leave one JSON file."""

import _source_tree  # noqa: F401
from dpprof.cli.profile import main

if __name__ == "__main__":
    main()
