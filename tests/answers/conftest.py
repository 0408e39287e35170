"""Capacities that several questions are asked about."""

from asked import asked, keep_capacities

__all__ = ["asked", "keep_capacities"]
