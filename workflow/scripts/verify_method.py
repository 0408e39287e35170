"""Prove that a method computes the reference's clipped gradient, and leave one JSON file."""

import _source_tree  # noqa: F401
from dpprof.cli.verify import main

if __name__ == "__main__":
    main()
