"""Say what a privacy budget costs with each method: noise, steps, GPU hours and money."""

import _source_tree

_source_tree.run("budget")
