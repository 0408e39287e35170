"""Fixtures that many tests share."""

import ctypes
import gc
import os
import random
import signal
import sys

import pytest

from dpprof.system.hardware import why_no_cuda


@pytest.fixture(autouse=True)
def own_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests from waiting for, or holding up, experiments on the same machine."""
    folder = os.environ.get("DPPROF_LOCK_DIR") or str(tmp_path_factory.getbasetemp())
    monkeypatch.setenv("DPPROF_LOCK_DIR", folder)
    monkeypatch.delenv("DPPROF_PROGRESS", raising=False)


@pytest.fixture(scope="session")
def pools():
    """Processes of a group of each size, which all tests of several ranks share."""
    from rank_pool import RankPools  # noqa: PLC0415 (it imports torch)

    made = RankPools()
    yield made
    made.close()


def pytest_configure() -> None:
    # What one process has compiled, the others read: this one's tests, and the package in children.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Ctrl-C is heard, by children too, also where a shell started this in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Threads that wait spinning stand still on a busy machine; read when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if "PYTEST_XDIST_WORKER" in os.environ:  # one of several, which share the cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")


GENERATORS: list[object] = []
"""The random generators that imports have made."""

MODULES = [0]
"""How many modules had been imported when the collector was last told to leave them alone."""


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what imports have made, which is no garbage."""
    from numpy.random import BitGenerator  # noqa: PLC0415 (not where nothing is collected)

    kinds = random.Random, BitGenerator
    GENERATORS[:] = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    leave_alone()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave alone what tests import too, and what a prediction in this process let go of."""
    has_imported = len(sys.modules) >= MODULES[0] + 100
    if nextitem is not None and (has_imported or nextitem.path != item.path):
        leave_alone()


def leave_alone() -> None:
    """Have the garbage collector know no object that there is, but for random generators.

    They are a million, and a check of a training looks among all that the collector knows for
    generators, which takes a quarter of a second. Those it must find: they stay known.
    """
    for one in GENERATORS:
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(one))
    gc.freeze()
    MODULES[0] = len(sys.modules)
    for one in GENERATORS:
        ctypes.pythonapi.PyObject_GC_Track(ctypes.py_object(one))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Not by addopts, which a -m of the command line would replace: `-m "not workflow"` is fast too.
    if "slow" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if "slow" in item.keywords])
        items[:] = [item for item in items if "slow" not in item.keywords]

    # Sweeps take longest, so they begin first: then processes that share the tests end together.
    # What trains on ranks follows, together, so that few of these processes start the ranks.
    items.sort(key=lambda item: ("workflow" not in item.keywords, "pools" not in item.fixturenames))

    if why_no_cuda() is not None:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
