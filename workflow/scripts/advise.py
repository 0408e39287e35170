"""Say which private method to use on a GPU that need not be here, and what that rests on."""

import _source_tree  # noqa: F401
from dpprof.cli.advise import main

if __name__ == "__main__":
    main()
