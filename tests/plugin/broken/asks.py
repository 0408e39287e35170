"""Asks for a library that nobody has."""

import a_library_that_is_not_here  # noqa: F401
