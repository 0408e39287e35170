"""What is said to be public can be imported, is documented, and its examples run."""

import doctest
import inspect
import sys

import pytest
from rank_pool import FORKS

import dpprof.measure.monitor
import dpprof.private

PUBLIC = [
    *((dpprof.private, name) for name in dpprof.private.__all__),
    *(
        (dpprof.measure.monitor, name) for name in dpprof.measure.monitor.__all__ if name != "Sink"
    ),  # a type
    *((dpprof.private, name) for name in dpprof.private.__all__),
]
GUARANTEED = [
    *("BookKeeping", "CapturedStep", "Clipping", "FlashClipping", "NoisyOptimizer"),
    "PerLayerClipping",
]


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda one: getattr(one, "__name__", one))
def test_public_names_are_documented(package, name) -> None:
    assert inspect.getdoc(getattr(package, name))


@pytest.mark.parametrize("name", [*GUARANTEED, "Monitor", "check"])
def test_examples_run(name) -> None:
    packages = {"Monitor": dpprof.measure.monitor, "check": dpprof.private}
    one = getattr(packages.get(name, dpprof.private), name)
    module = sys.modules[one.__module__]
    (test,) = doctest.DocTestFinder(recurse=False).find(one, name, module=module, globs={})

    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("name", GUARANTEED)
def test_guarantees_are_stated(name) -> None:
    assert "Formal guarantees:" in inspect.getdoc(getattr(dpprof.private, name))


def test_the_limits_of_a_check_are_stated() -> None:
    assert "Guarantee:" in dpprof.private.check.__doc__
    assert "it does not prove that there is none" in dpprof.private.check.__doc__


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NoSuch'"):
        _ = dpprof.private.NoSuch


def test_libraries_need_none_of_the_extras() -> None:
    """In a process that has imported torch and dpprof.private alone."""
    code = """
import sys
import dpprof.private, dpprof.measure.monitor, dpprof.private
dpprof.private.check
for name in set(dpprof.private.__all__) - {"PrivateTrainer", "PrivacyArguments"}:
    getattr(dpprof.private, name)
extras = {"snakemake", "matplotlib", "typst", "jinja2", "tensorboard", "pandas"}
extras |= {"transformers", "peft"}
assert not extras & set(sys.modules), extras & set(sys.modules)
"""
    process = FORKS.Process(target=exec, args=(code, {}))
    process.start()
    process.join()
    assert process.exitcode == 0
