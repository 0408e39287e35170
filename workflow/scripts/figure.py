"""Draw one figure from tables that exist."""

import _source_tree

_source_tree.run("figure")
