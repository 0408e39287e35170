"""Measure what a device can do at most, and leave one JSON file."""

import _source_tree

_source_tree.run("ceilings")
