"""Measure one experiment in a process of its own and leave one JSON file."""

import _source_tree

_source_tree.run("profile")
