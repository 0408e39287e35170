"""List files in results/ that none of the given configs asks for; --delete deletes them."""

import _source_tree

_source_tree.run("prune")
