"""Capacities that several commands are asked about."""

from asked import asked, keep_capacities, without_kept

__all__ = ["asked", "keep_capacities", "without_kept"]
