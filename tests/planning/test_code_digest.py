import ast
import functools
import json
import shutil
import sys
from pathlib import Path

import pytest
from factory import make_experiment
from fresh_process import ROOT, run_fresh

from dpprof.experiments.config import registry
from dpprof.experiments.planning import job_environment
from dpprof.experiments.planning.code_digest import (
    _imports,
    code_digest,
    limiting_files,
    measuring_files,
    read_anew,
    verdict_digest,
    verifying_files,
)
from dpprof.system.paths import PACKAGE

LOADED = r"""
import json, os, sys
import opacus, torch._dynamo  # once for all: what follows runs in forks of this process

CALLS = {
    "verdict": "from dpprof.experiments.launch import verification_run\n"
    "from dpprof.experiments.records.verdict import judged\n"
    "from dpprof.measure.verification import verify\n"
    "cases = judged(verify.verify('built-in', 'opacus-ghost').cases)\n"
    "assert {one.outcome for one in cases} == {'passed'}, cases",
    "ceilings": "from dpprof.measure.devices import limits\n"
    "from dpprof.experiments.launch import ceilings_run\n"
    "limits.measure_limits(limits.open_device('cpu'), limits.Extent((4,), (64,), 0.001, 1))",
}
WORK = (
    "import tempfile\n"
    "from dpprof.experiments.launch.worker import work\n"
    "file = tempfile.TemporaryFile()\n"
    "report = work({spec!r}, {name!r}, file.fileno())\n"
    "assert report.outcome == 'ok', report"
)
found = {}
for name in [*json.loads(sys.argv[2]), *CALLS]:
    code = CALLS.get(name) or WORK.format(spec=sys.argv[1], name=name)
    reading, writing = os.pipe()
    if os.fork() == 0:
        exec(code)
        files = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "dpprof"]
        os.write(writing, json.dumps(files).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found[name] = json.loads(pipe.read())
    os.wait()
print("LOADED", json.dumps(found))
"""


@pytest.mark.parametrize(
    "instruments",
    [["clean", "estimate"], pytest.param(registry.names("instruments"), marks=pytest.mark.slow)],
)
def test_digests_cover_every_file_that_is_really_loaded(instruments) -> None:
    """By a worker under each instrument, by a verification and by a measurement of ceilings."""
    experiment = make_experiment(method="opacus-ghost", attention="opacus")
    said = run_fresh(LOADED, experiment.canonical, json.dumps(instruments)).splitlines()[-1]
    loaded = json.loads(said.removeprefix("LOADED "))

    covered = {name: measuring_files(name, "opacus-ghost") for name in instruments}
    covered["verdict"] = verifying_files("built-in", "opacus-ghost")
    covered["ceilings"] = limiting_files()
    assert loaded.keys() == covered.keys()
    for name, files in loaded.items():
        assert {Path(file).resolve() for file in files} <= set(covered[name]), name


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


def test_an_instrument_does_not_depend_on_another() -> None:
    clean, phases = (
        {file.name for file in measuring_files(name, "standard")} for name in ("clean", "phases")
    )

    assert clean - phases == {"clean.py"}
    assert phases - clean == {"phases.py", "census.py", "tensors.py"}


def test_a_method_does_not_depend_on_another_nor_on_the_report() -> None:
    names = {
        str(file.relative_to(PACKAGE))
        for file in measuring_files("clean", "opacus-hooks")
        if file.is_relative_to(PACKAGE)
    }

    assert "subjects/methods/opacus/hooks.py" in names
    assert "subjects/methods/opacus/per_sample.py" in names
    assert "subjects/methods/opacus/opacus_step.py" in names
    assert "subjects/methods/opacus/ghost.py" not in names
    assert not any(name.startswith(("report/", "figures/", "analysis/")) for name in names)
    assert "sweep.py" not in names


def test_what_parses_options_or_tells_progress_does_not_matter() -> None:
    names = {file.name for file in measuring_files("clean", "standard")}

    assert {"worker.py", "ranks_run.py", "supervisor.py", "clean.py"} <= names
    assert not names & {"options.py", "profile.py", "progress.py", "planner.py"}


PLUGINS = {
    "dpprof_test_methods.py": (
        ("estimate", {"model": "test-linear"}),
        ("estimate", {"target": "test-board", "device": "cuda"}),
        ("clean", {"method": "test-right"}),
    ),
    "dpprof_test_methods-1.0.dist-info/METADATA": (
        ("estimate", {"model": "test-linear"}),
        ("clean", {"method": "test-right"}),
    ),
    "dpprof_test_instruments.py": (("test-measures", {}),),
}


@pytest.mark.parametrize("edited", PLUGINS)
def test_another_packages_parts_count_by_their_source_and_its_version(
    tmp_path, monkeypatch, edited
) -> None:
    shutil.copytree(ROOT / "tests" / "plugin", tmp_path / "plugin")
    monkeypatch.syspath_prepend(tmp_path / "plugin")
    for name in PLUGINS:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.setattr(registry, "_entries", functools.cache(registry._entries.__wrapped__))
    own = {"model": "tiny", "target": "h200", "device": "cuda"}

    def digests() -> list[str]:
        read_anew()
        registry._entries.cache_clear()
        return [
            code_digest(instrument, make_experiment(**fields))
            for instrument, fields in (*PLUGINS[edited], ("estimate", own))
        ]

    before = digests()
    path = tmp_path / "plugin" / edited
    text = path.read_text().replace("Version: 1.0", "Version: 1.1")
    path.write_text(text + ("EDITED = True\n" if path.suffix == ".py" else ""))
    *others, unchanged = [one == other for one, other in zip(before, digests(), strict=True)]

    read_anew()
    assert not any(others)
    assert unchanged


def test_another_version_of_torch_or_opacus_is_other_code(monkeypatch) -> None:
    real, digests = job_environment.package_versions, {}
    for edited in ("none", "torch", "opacus", "numpy"):
        monkeypatch.setattr(
            job_environment,
            "package_versions",
            lambda names, edited=edited: (
                real(names) | {one: "0.1" for one in names if one == edited}
            ),
        )
        read_anew()
        digests[edited] = code_digest("clean", make_experiment())
    read_anew()

    assert len({digests[name] for name in ("none", "torch", "opacus")}) == 3
    assert digests["numpy"] == digests["none"]


def test_predictions_depend_on_the_tables_of_measured_speeds() -> None:
    predicting, timing = (
        {file.name for file in measuring_files(name, "standard")} for name in ("estimate", "clean")
    )

    assert {"product_table.py", "h100.json"} <= predicting
    assert not {"product_table.py", "h100.json"} & timing


def imports_by_syntax(source: bytes) -> set[str]:
    """Return the dpprof modules and the names in them that a source imports, whenever it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] == PACKAGE.name}


def file_of(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"


def test_imports_are_those_of_the_syntax_tree() -> None:
    missed, types_only = [], b"if TYPE_CHECKING:"
    for file in PACKAGE.rglob("*.py"):
        source = file.read_bytes()
        expected = {path for path in map(file_of, imports_by_syntax(source)) if path.is_file()}
        if types_only not in source and not expected <= _imports(source):
            missed.append(file)

    assert missed == []


ODD_IMPORTS = {
    "after another": "import os; import dpprof.predict.memory.atoms",
    "on one line": "try: from dpprof.predict.memory import atoms\nexcept ImportError: pass",
    "continued": "from dpprof.predict.memory import \\\n    pattern, \\\n    atoms",
    "with a comment": "from dpprof.predict.memory import (  # (one)\n    atoms as a,  # )\n)",
    "inside": "def f():\n    from dpprof.predict.memory import atoms as found; return found",
    "beside types": "if TYPE_CHECKING:\n    1\nelse:\n    import dpprof.predict.memory.atoms",
}


@pytest.mark.parametrize("how", ODD_IMPORTS)
def test_an_import_is_found_however_it_is_written(how) -> None:
    assert PACKAGE / "predict" / "memory" / "atoms.py" in _imports(
        ODD_IMPORTS[how].encode() + b"\n"
    )


def test_an_import_for_types_alone_does_not_count() -> None:
    source = (
        b"if TYPE_CHECKING:\n    from dpprof.predict import (\n        memory,\n    )\nimport ast\n"
    )
    assert _imports(source) == set()
