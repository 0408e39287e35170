"""From the import of this module on, this process collects no garbage; a server begins with it."""

import gc

gc.disable()
