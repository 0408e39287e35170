"""Draw one figure from tables that exist."""

import _source_tree  # noqa: F401
from dpprof.cli.figure import main

if __name__ == "__main__":
    main()
