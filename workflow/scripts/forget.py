"""Forget results, so that the next snakemake runs those experiments again."""

import _source_tree  # noqa: F401
from dpprof.cli.forget import main

if __name__ == "__main__":
    main()
