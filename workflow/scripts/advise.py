"""Say which private method to use on a GPU that need not be here, and what that rests on."""

import _source_tree

_source_tree.run("advise")
