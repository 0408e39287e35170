import json
import shutil
from pathlib import Path

import pytest
from factory import make_experiment
from fresh_process import ROOT, run_fresh

from dpprof.planning.code_digest import (
    code_digest,
    limiting_files,
    measuring_files,
    verdict_digest,
    verified_as,
    verifying_files,
)
from dpprof.spec import registry
from dpprof.system.paths import PACKAGE

LOADED = """
import json, sys
from dpprof.spec.experiment import Experiment
from dpprof.launch.protocol import PhaseMark
from dpprof.launch.measuring import run
import tempfile
file = tempfile.TemporaryFile()
mark = PhaseMark(file.fileno())
report = run(Experiment.model_validate_json(sys.argv[1]), sys.argv[2], mark)
assert report.outcome == "ok", report
files = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "dpprof"]
print("LOADED", json.dumps(files))
"""


@pytest.mark.parametrize("instrument", registry.names("instruments"))
def test_the_digest_covers_every_file_that_a_worker_really_loads(instrument) -> None:
    experiment = make_experiment(method="opacus-ghost", attention="opacus")
    said = run_fresh(LOADED, experiment.canonical, instrument)
    line = next(text for text in said.splitlines() if text.startswith("LOADED"))
    loaded = {Path(file).resolve() for file in json.loads(line.removeprefix("LOADED "))}

    assert loaded <= set(measuring_files(instrument, "opacus-ghost"))


VERIFIED = """
import json, sys
from dpprof.records.verdict import judged
from dpprof.launch import verification_run
from dpprof.verification import verify
cases = judged(verify.verify("built-in", "opacus-ghost").cases)
assert {one.outcome for one in cases} == {"passed"}, cases
files = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "dpprof"]
print("LOADED", json.dumps(files))
"""


def test_a_verdicts_digest_covers_every_file_that_verifying_really_loads() -> None:
    line = next(t for t in run_fresh(VERIFIED).splitlines() if t.startswith("LOADED"))
    loaded = {Path(file).resolve() for file in json.loads(line.removeprefix("LOADED "))}

    assert loaded <= set(verifying_files("built-in", "opacus-ghost"))


LIMITED = """
import json, sys
from dpprof.devices import limits
from dpprof.launch import ceilings_run
limits.measure_limits(limits.open_device("cpu"), limits.Extent((4,), (64,), 0.001, 1))
files = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "dpprof"]
print("LOADED", json.dumps(files))
"""


def test_the_digest_of_ceilings_covers_every_file_that_measuring_them_really_loads() -> None:
    line = next(t for t in run_fresh(LIMITED).splitlines() if t.startswith("LOADED"))
    loaded = {Path(file).resolve() for file in json.loads(line.removeprefix("LOADED "))}

    assert loaded <= set(limiting_files())


def test_ceilings_depend_on_no_method_nor_on_the_report_and_no_experiment_on_them() -> None:
    names = {file.name for file in limiting_files()}

    assert {"limits.py", "cuda.py", "ceilings_run.py"} <= names
    assert not names & {"planner.py", "worker.py", "clean.py", "tables.py", "transformer.py"}
    assert "limits.py" not in {file.name for file in measuring_files("clean", "standard")}


def test_a_verdict_depends_on_its_method_and_on_no_other_nor_on_the_report() -> None:
    names = {file.name for file in verifying_files("built-in", "opacus-hooks")}

    assert {"hooks.py", "transformer.py", "reference.py", "microbatch.py"} <= names
    assert not names & {"ghost.py", "planner.py", "worker.py", "clean.py", "tables.py"}
    ghost, hooks = (verdict_digest("built-in", f"opacus-{name}") for name in ("ghost", "hooks"))
    assert ghost != hooks


def test_every_size_of_our_transformer_is_verified_as_one() -> None:
    models = [make_experiment().model, *registry.names("models")]

    assert {verified_as(make_experiment(model=model)) for model in models} == {"built-in"}


def test_an_instrument_does_not_depend_on_another() -> None:
    clean, phases = (
        {file.name for file in measuring_files(name, "standard")} for name in ("clean", "phases")
    )

    assert clean - phases == {"clean.py"}
    assert phases - clean == {"phases.py"}


def test_a_method_does_not_depend_on_another_nor_on_the_report() -> None:
    names = {
        str(file.relative_to(PACKAGE))
        for file in measuring_files("clean", "opacus-hooks")
        if file.is_relative_to(PACKAGE)
    }

    assert "methods/opacus/hooks.py" in names
    assert "methods/opacus/per_sample.py" in names
    assert "methods/opacus/opacus_step.py" in names
    assert "methods/opacus/ghost.py" not in names
    assert not any(name.startswith(("report/", "figures/", "analysis/")) for name in names)
    assert "sweep.py" not in names


def test_digests_differ_between_methods_and_not_between_our_models() -> None:
    def digest(**fields) -> str:
        return code_digest("clean", make_experiment(**fields))

    assert digest(method="standard") != digest(method="microbatch")
    assert digest(model="tiny") == digest(model="small") == digest()


def test_what_parses_options_or_tells_progress_does_not_matter() -> None:
    names = {file.name for file in measuring_files("clean", "standard")}

    assert {"worker.py", "rank.py", "supervisor.py", "clean.py"} <= names
    assert not names & {"options.py", "profile.py", "progress.py", "planner.py"}


def test_another_packages_model_and_target_count_by_their_source(tmp_path) -> None:
    plugin = tmp_path / "plugin"
    shutil.copytree(ROOT / "tests" / "plugin", plugin)

    def digests() -> list[str]:
        code = """
from factory import make_experiment
from dpprof.planning.code_digest import code_digest
for fields in (
    {"model": "test-linear"},
    {"target": "test-board", "device": "cuda"},
    {"model": "tiny", "target": "h200", "device": "cuda"},
):
    print(code_digest("estimate", make_experiment(**fields)))
"""
        return run_fresh(code, plugin=plugin).splitlines()

    before = digests()
    with (plugin / "dpprof_test_methods.py").open("a") as file:
        file.write("EDITED = True\n")
    after = digests()

    assert [one != other for one, other in zip(before, after, strict=True)] == [True, True, False]


def test_another_packages_instrument_counts_by_its_source(tmp_path) -> None:
    plugin = tmp_path / "plugin"
    shutil.copytree(ROOT / "tests" / "plugin", plugin)
    code = """
from factory import make_experiment
from dpprof.planning.code_digest import code_digest
print(*(code_digest(name, make_experiment()) for name in ("test-measures", "clean")))
"""
    before = run_fresh(code, plugin=plugin).split()
    with (plugin / "dpprof_test_instruments.py").open("a") as file:
        file.write("EDITED = True\n")
    after = run_fresh(code, plugin=plugin).split()

    assert [one != other for one, other in zip(before, after, strict=True)] == [True, False]


def test_another_version_of_torch_or_opacus_is_other_code() -> None:
    code = """
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.1" if name == sys.argv[1] else real(name)
from factory import make_experiment
from dpprof.planning.code_digest import code_digest
print(code_digest("clean", make_experiment()))
"""
    digests = [run_fresh(code, name) for name in ("none", "torch", "opacus", "numpy")]

    assert len({*digests[:3]}) == 3
    assert digests[3] == digests[0]


def test_predictions_depend_on_the_tables_of_measured_speeds() -> None:
    predicting, timing = (
        {file.name for file in measuring_files(name, "standard")} for name in ("estimate", "clean")
    )

    assert {"product_table.py", "h100.json"} <= predicting
    assert not {"product_table.py", "h100.json"} & timing
