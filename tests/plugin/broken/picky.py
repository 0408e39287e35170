"""Refuses to be imported."""

from dpprof.private import UnsupportedError as No

raise No("no luck")
