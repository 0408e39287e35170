"""Write the report from tables and figures that exist."""

import _source_tree

_source_tree.run("report")
