"""Forget results, so that the next snakemake runs those experiments again."""

import _source_tree

_source_tree.run("forget")
