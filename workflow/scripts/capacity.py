"""Say how large a batch fits on a GPU that need not be here, for every method."""

import _source_tree  # noqa: F401
from dpprof.cli.capacity import main

if __name__ == "__main__":
    main()
