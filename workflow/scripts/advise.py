"""Say how large a batch fits on a GPU that need not be here, and which private method to use."""

import _source_tree

_source_tree.run("advise")
