"""What a run imports, and what it does not; nothing here is timed, ``perf/cheap_runs.py`` does."""

import json

import pytest
from factory import make_experiment
from fresh_process import run_fresh

from dpprof.experiments.config import registry

RUN = """
import gc, json, sys, tempfile
from dpprof.experiments.launch.worker_report import PhaseMark
from dpprof.experiments.launch.worker import run
from dpprof.experiments.config.experiment import Experiment

mark = PhaseMark((file := tempfile.TemporaryFile()).fileno())
libraries = {"opacus", "scipy", "pandas", "matplotlib", "jinja2", "tensorboard", "yte"}
libraries |= {"transformers", "peft", "snakemake", "torch"}
found = {}
for spec, instrument in json.loads(sys.argv[1]):
    experiment = Experiment.model_validate_json(spec)
    report = run(experiment, instrument, mark)
    assert report.outcome == "ok", report
    found[f"{experiment.method} {instrument}"] = sorted(libraries & set(sys.modules))
assert gc.isenabled() and gc.get_freeze_count() > 100_000  # imported without collections
print("FOUND", json.dumps(found))
"""
OWN = [name for name in registry.names("methods") if not name.startswith("opacus-")]
OPACUS = [name for name in registry.names("methods") if name.startswith("opacus-")]


def libraries_of(*runs: tuple[str, str]) -> dict[str, list[str]]:
    """Run experiments in one process; returns the libraries that are there after each."""
    # More noise is too much for opacus-adaptive and such a small batch.
    experiments = [make_experiment(method=method, noise_multiplier=0.1) for method, _ in runs]
    specs = [(one.canonical, name) for one, (_, name) in zip(experiments, runs, strict=True)]
    line = run_fresh(RUN, json.dumps(specs)).splitlines()[-1]
    return json.loads(line.removeprefix("FOUND "))


def test_methods_of_opacus_alone_import_it_and_none_what_only_a_report_needs() -> None:
    instruments = ("phases", "memory", "kernels", "estimate")
    runs = [(method, "clean") for method in OWN] + [("flash-bk", name) for name in instruments]

    # What one run imports stays for the next ones, so those of Opacus come last.
    for run, libraries in libraries_of(*runs, *((method, "clean") for method in OPACUS)).items():
        needed = ["opacus", "scipy", "torch"] if run.startswith("opacus-") else ["torch"]
        assert libraries == needed, run


@pytest.mark.parametrize(
    "module", ["dpprof.ask.commands.profile", "dpprof.experiments.launch.supervisor"]
)
def test_a_supervisor_imports_no_library_that_computes(module) -> None:
    libraries = '{"torch", "opacus", "numpy", "scipy", "pandas", "matplotlib"}'
    assert run_fresh(f"import sys, {module}; print({libraries} & set(sys.modules))") == "set()"
