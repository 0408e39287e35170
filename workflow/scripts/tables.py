"""Read the results that a manifest lists and write tidy CSV tables."""

import _source_tree

_source_tree.run("tables")
