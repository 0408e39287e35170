"""The workflow from another folder, as a module, with results in a storage, planned by a Python
that has no torch."""

import importlib.util
import json
import os
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from checkout import TABLES, Checkout, quick_checkout

pytestmark = pytest.mark.workflow

PARENT = """
module dpprof:
    snakefile: "{snakefile}"
    config: config["profiling"]
    prefix: "deep/er"

use rule * from dpprof as dpprof_*

rule mine:
    input: rules.dpprof_tables.output.manifest
    output: "mine.txt"
    shell: "cp {{input}} {{output}}"
"""

WITHOUT_TORCH = """
import importlib.machinery, importlib.metadata

MISSING = {"torch", "opacus", "pynvml", "scipy", "matplotlib"}
find, version = importlib.machinery.PathFinder.find_spec, importlib.metadata.version

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in MISSING else find(name, path, target)

def find_version(name):
    if name in MISSING:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.machinery.PathFinder.find_spec = find_spec
importlib.metadata.version = find_version
"""

CONDA = """#!/bin/sh
case "$*" in
  --version) echo "conda 24.9.2" ;;
  "info --json") echo '{"conda_prefix": "/nowhere", "platform": "linux-64"}' ;;
  *) echo '{"get": {"channel_priority": "strict"}}' ;;
esac
"""


def outcomes(folder: Path) -> list[str]:
    return [json.loads(path.read_text())["outcome"] for path in sorted(folder.glob("*.json"))]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout that is only read, of one method: everything is made in other folders."""
    checkout = quick_checkout(tmp_path_factory.mktemp("clone") / "checkout")
    checkout.edit("config/config.yaml", "[standard, opacus-hooks]", "standard")
    return checkout


def test_another_workflow_uses_this_one_as_a_module(clone: Checkout, tmp_path: Path) -> None:
    snakefile = clone.path / "workflow" / "Snakefile"
    (tmp_path / "Snakefile").write_text(PARENT.format(snakefile=snakefile))
    config = json.dumps({"profiling": clone.config(), "mine": 1})
    (tmp_path / "my.yaml").write_text(config)
    parent = Checkout(tmp_path)
    options = ("mine", "--cores", "2", "--configfile", "my.yaml", "--rerun-triggers", "mtime")
    parent.snakemake(*options)

    made = tmp_path / "deep" / "er" / "results"
    assert outcomes(made / "clean") == ["ok"] * 2
    assert (tmp_path / "mine.txt").read_text() == (made / "tables/manifest.txt").read_text()
    assert "Nothing to be done" in parent.snakemake(*options, "-n")
    assert not (clone.path / "results").exists()


needs_storage = pytest.mark.skipif(
    not (shutil.which("rsync") and importlib.util.find_spec("snakemake_storage_plugin_fs")),
    reason="needs snakemake-storage-plugin-fs, and rsync, which it calls",
)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[str, ...]:
    """Options by which results are in a storage, and all else in another folder."""
    storage = ("--default-storage-provider", "fs", "--default-storage-prefix")
    return (*storage, str(tmp_path / "store"), "--directory", str(tmp_path / "here"))


@needs_storage
def test_a_sweep_whose_results_are_in_a_storage_is_planned_here(
    clone: Checkout, stored, tmp_path: Path
) -> None:
    planned = clone.planned(*stored)

    counts = {rule: len(outputs) for rule, outputs in planned.items()}
    assert [counts[rule] for rule in ("profile", "verify", "ceilings", "report")] == [2, 1, 1, 1]
    assert [path.name for path in (tmp_path / "here" / "results").iterdir()] == ["plan"]


@needs_storage
@pytest.mark.slow
def test_a_sweep_whose_results_are_in_a_storage_ends_in_its_report(
    clone: Checkout, stored, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    clone.snakemake(*stored)

    assert outcomes(store / "results" / "clean") == ["ok"] * 2
    assert (store / "results" / "report.pdf").read_bytes().startswith(b"%PDF")
    assert [path.name for path in (tmp_path / "here" / "results").iterdir()] == ["plan"]
    assert "Nothing to be done" in clone.snakemake(*stored, "-n")
    said = clone.snakemake(*stored, "--config", "partial=true", status=1)
    assert "partial=true reports on what is in ./results; leave it out with a storage" in said


def test_a_python_without_torch_plans_the_same_and_runs_nothing(
    finished: Checkout, tmp_path: Path
) -> None:
    """As where Snakemake lives in an environment of its own, and conda makes another for jobs."""
    environment = finished.path / "envs" / "dpprof.yaml"
    installed = f"torch=={version('torch').partition('+')[0]}"
    environment.write_text(re.sub(r"(?m)torch==\S+", installed, environment.read_text()))
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    (tmp_path / "conda").write_text(CONDA)
    (tmp_path / "conda").chmod(0o755)
    path = f"{Path(sys.executable).parent}{os.pathsep}{tmp_path}{os.pathsep}{os.environ['PATH']}"
    bare = Checkout(finished.path, {"PYTHONPATH": str(tmp_path), "PATH": path})
    assert "Nothing to be done" in bare.snakemake(TABLES, "--sdm", "conda", "-n")

    before = finished.results()
    said = bare.snakemake(TABLES, status=1)
    assert "torch is not installed for" in said
    assert "or let Snakemake make one: snakemake --sdm conda" in said
    assert finished.results() == before


def test_results_without_their_plan_count_and_an_unplanned_id_is_told(
    finished: Checkout,
) -> None:
    """Such as those that were copied from another machine, oldest first or not."""
    shutil.rmtree(finished.path / "results" / "plan")
    shutil.rmtree(finished.path / ".snakemake")
    (stale,) = (finished.path / "results" / "clean").glob("*hooks*.json")
    other = json.loads(stale.read_text()) | {"code_digest": "0" * 64}
    stale.write_text(json.dumps(other))
    for path in (finished.path / "results").rglob("*.json"):
        os.utime(path, (1, 1))
    planned = finished.planned(TABLES)

    assert set(planned) == {"profile", "tables"}
    assert planned["profile"] == [stale.name]
    said = finished.snakemake("results/clean/tiny-standard-b1-t8-00000000.r0.json", status=1)
    assert "results/plan/specs/tiny-standard-b1-t8-00000000.json" in said
    assert "Missing input files for rule profile" in said
    assert "Traceback" not in said
