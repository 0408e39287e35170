"""List files in results/ that none of the given configs asks for; --delete deletes them."""

import _source_tree  # noqa: F401
from dpprof.cli.prune import main

if __name__ == "__main__":
    main()
