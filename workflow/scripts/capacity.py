"""Say how large a batch fits on a GPU that need not be here, for every method."""

import _source_tree

_source_tree.run("capacity")
