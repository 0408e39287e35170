"""Read the results that a manifest lists and write tidy CSV tables."""

import _source_tree  # noqa: F401
from dpprof.cli.tables import main

if __name__ == "__main__":
    main()
