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
