"""The library by itself: public names are documented, examples run, a wheel of it alone works."""

import doctest
import inspect
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from rank_pool import FORKS

import dpprof.measure.monitor
import dpprof.private

PUBLIC = [
    *((dpprof.private, name) for name in dpprof.private.__all__),
    *(
        (dpprof.measure.monitor, name) for name in dpprof.measure.monitor.__all__ if name != "Sink"
    ),  # a type
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
import dpprof.private, dpprof.measure.monitor
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


ROOT = Path(__file__).resolve().parents[2]
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "dpprof-private"
version = "0.1.0"
[tool.setuptools.packages.find]
where = ["src"]
namespaces = true
"""
CLIPS = """
import sys
import torch
from dpprof.private import NoisyOptimizer, BookKeeping

model = torch.nn.Linear(3, 1, bias=False)
clipping = BookKeeping(model, max_grad_norm=0.5)
optimizer = NoisyOptimizer(
    torch.optim.SGD(model.parameters(), lr=1.0), clipping, noise_multiplier=0.0,
    expected_batch_size=2,
)
before = model.weight.detach().clone()
clipping.backward(model(torch.ones(2, 3)).squeeze(1))
optimizer.step()
# Each gradient is (1, 1, 1), of norm 3^0.5, clipped to 0.5; the step is their mean.
assert torch.allclose(before - model.weight, torch.full((1, 3), 0.5 / 3**0.5)), model.weight
assert not {"pydantic", "opacus", "pandas", "yaml"} & set(sys.modules)
from dpprof.private import PrivateTrainer, check, make_private
loaded = {name for name in sys.modules if name.startswith("dpprof.")}
assert {name.split(".")[1] for name in loaded} == {"private"}, loaded
print("clipped")
"""


@pytest.mark.parametrize("is_wheel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_library_alone_clips_a_model(is_wheel, tmp_path) -> None:
    """As a folder, or as the wheel that is built of it."""
    alone = tmp_path / "src"
    kept = shutil.ignore_patterns("__pycache__")
    source = ROOT / "src" / "dpprof" / "private"
    shutil.copytree(source, alone / "dpprof" / "private", ignore=kept)
    if is_wheel:
        (tmp_path / "pyproject.toml").write_text(PROJECT)
        alone = tmp_path / "alone"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        options = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", str(alone)]
        subprocess.run([*pip, *options, "."], cwd=tmp_path, check=True)

    # Without the site module nothing but these folders is found: no editable dpprof.
    clipped = subprocess.run(
        [sys.executable, "-S", "-c", CLIPS],
        env={"PYTHONPATH": f"{alone}:{sysconfig.get_path('purelib')}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert clipped.stdout == "clipped\n", clipped.stderr
