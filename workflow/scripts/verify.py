"""Prove that a method computes the reference's clipped gradient, and leave one JSON file."""

import _source_tree

_source_tree.run("verify")
