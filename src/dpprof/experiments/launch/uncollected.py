"""Stops garbage collection in this process as it is imported; a server begins with it."""

import gc

gc.disable()
