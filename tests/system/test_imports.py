"""Garbage is collected after the imports of a process as before, but not meanwhile."""

from fresh_process import run_fresh

USED = """
import gc, weakref
from dpprof.system.imports import collecting_no_garbage

class Cycle:
    def __init__(self):
        self.itself = self

def make():
    return weakref.ref(Cycle())

collections = []
gc.callbacks.append(lambda phase, _: collections.append(phase))
"""


def test_nothing_is_collected_meanwhile_and_all_is_collected_afterwards() -> None:
    code = f"""{USED}
with collecting_no_garbage():
    collections.clear()
    during = make()
    kept = [[] for _ in range(100_000)]
    assert not collections
assert gc.isenabled() and gc.get_freeze_count() > 100_000
after = make()
gc.collect()
print(during() is not None, after() is None)
"""
    assert run_fresh(code) == "True True"


def test_an_import_that_fails_leaves_the_collector_as_it_was() -> None:
    code = f"""{USED}
for enable in (gc.enable, gc.disable):
    enable()
    before = gc.isenabled()
    try:
        with collecting_no_garbage():
            import no_such_module
    except ImportError:
        print(gc.isenabled() == before)
"""
    assert run_fresh(code).split() == ["True", "True"]


def test_the_first_use_of_the_library_imports_torch_without_collections() -> None:
    code = """
import gc, sys
import dpprof.private
collections = []
gc.callbacks.append(lambda phase, _: "torch" in sys.modules or collections.append(phase))
gc.disable()
dpprof.private.UnsupportedError
print(gc.isenabled())
gc.enable()
gc.callbacks[-1] = lambda phase, _: collections.append(phase)
find = dpprof.private.__getattr__
gc.collect()
collections.clear()
clipping = find("BookKeeping")
print(gc.isenabled(), "torch" in sys.modules, len(collections) <= 2)
"""
    assert run_fresh(code).split() == ["False", "True", "True", "True"]
