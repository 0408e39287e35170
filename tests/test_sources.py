import json
import os
import subprocess
import sys
from pathlib import Path

from factory import make_experiment

from dpprof.sources import PACKAGE, code_digest, measuring_files

ROOT = Path(__file__).parents[1]

LOADED = """
import json, sys
from dpprof.experiment import Experiment
from dpprof.handover import PhaseMark
from dpprof.worker import run
import tempfile
file = tempfile.TemporaryFile()
mark = PhaseMark(file.fileno())
report = run(Experiment.model_validate_json(sys.argv[1]), "clean", mark)
assert report.outcome == "ok", report
files = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "dpprof"]
print("LOADED", json.dumps(files))
"""


def test_the_digest_covers_every_file_that_a_worker_really_loads() -> None:
    experiment = make_experiment(method="opacus-ghost")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, experiment.canonical],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    line = next(text for text in done.stdout.splitlines() if text.startswith("LOADED"))
    loaded = {Path(file).resolve() for file in json.loads(line.removeprefix("LOADED "))}

    assert loaded <= set(measuring_files("clean", "opacus-ghost"))


def test_a_method_does_not_depend_on_another_nor_on_the_report() -> None:
    names = {
        str(file.relative_to(PACKAGE))
        for file in measuring_files("clean", "opacus-hooks")
        if file.is_relative_to(PACKAGE)
    }

    assert "methods/opacus_hooks.py" in names
    assert "methods/opacus_optimizer.py" in names
    assert "methods/opacus_ghost.py" not in names
    assert not any(name.startswith(("report/", "figures/", "analysis/")) for name in names)
    assert "sweep.py" not in names


def test_digests_differ_between_methods() -> None:
    assert code_digest("clean", "standard") != code_digest("clean", "microbatch")
