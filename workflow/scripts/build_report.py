"""Write the report from tables and figures that exist."""

import _source_tree  # noqa: F401
from dpprof.cli.report import main

if __name__ == "__main__":
    main()
