"""Say what got worse from one folder of results to another: memory, FLOPs, bytes moved, time."""

import _source_tree

_source_tree.run("compare")
