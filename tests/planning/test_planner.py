import copy
import json
import os
import time
from pathlib import Path

import pytest
import yaml

from dpprof.experiments.config.target import RATED
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning import planner
from dpprof.experiments.planning.artifacts import LIMITS, PLAN, VERDICT, traces_path
from dpprof.experiments.planning.planner import files_beyond, make_plan, read_manifest, write_plan
from dpprof.experiments.records import answers
from dpprof.system.hardware import Gpu

CONFIG = {
    "defaults": {"model": "tiny", "seq_len": 8},
    "sweeps": {
        "one": {"method": ["standard", "opacus-hooks"], "batch_size": [1, 2], "replicates": 2},
        "two": {"method": "standard", "batch_size": 2},
    },
}


SWEEP = {"model": "tiny", "method": "standard", "batch_size": 1, "seq_len": 4}


def plan_of(config, device="cpu"):
    return make_plan(config, device=lambda: device)


def plan_sweep(device="cpu", **keys):
    """Plan one sweep on a host whose ``auto`` is a device."""
    return plan_of({"sweeps": {"s": SWEEP | keys}}, device)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_that_two_sweeps_ask_for_is_planned_once() -> None:
    manifest = plan_of(CONFIG).manifest

    assert len(manifest.runs) == 2 * 2 * 2
    shared = [run for run in manifest.runs if run.sweeps == ("one", "two")]
    assert [(run.method, run.replicate) for run in shared] == [("standard", 0)]


BUDGET = {"samples": 1000, "tokens": "1e6", "epsilon": 8, "delta": 1e-4}
PRICED = {"defaults": CONFIG["defaults"], "privacy": BUDGET}
PRICED |= {
    "sweeps": {
        "c": {"method": "standard", "batch_size": 1, "target": "h200", "instruments": "capacity"}
    }
}


def test_a_manifest_has_the_privacy_budget_and_another_budget_is_another_manifest(tmp_path) -> None:
    manifest = plan_of(PRICED).manifest
    other = plan_of(PRICED | {"privacy": BUDGET | {"epsilon": 4}}).manifest
    none = plan_of({key: value for key, value in PRICED.items() if key != "privacy"}).manifest
    path = tmp_path / "manifest.json"
    path.write_text(manifest.text)

    assert read_manifest(path) == manifest
    assert manifest.privacy.samples == 1000
    assert len({manifest.path, other.path, none.path}) == 3
    assert "privacy" not in none.text


def test_a_privacy_budget_that_nothing_prices_is_refused() -> None:
    with pytest.raises(InputError, match=r"^privacy: hours are told from capacity results; give a"):
        plan_of(CONFIG | {"privacy": BUDGET})
    with pytest.raises(
        InputError, match=r"privacy\.tokens: 7999 is not allowed; it must be at leas"
    ):
        plan_of(PRICED | {"privacy": BUDGET | {"tokens": 7999}})


def test_planning_twice_touches_nothing(reported) -> None:
    folder = reported
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    time.sleep(0.01)
    write_plan(plan_of(CONFIG))

    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


@pytest.fixture
def reported(folder) -> Path:
    """A folder in which the config's results and tables exist; their content is not read."""
    plan = plan_of(CONFIG)
    for artifact in plan.artifacts:
        (folder / artifact.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / artifact.path).touch()
    tables = folder / "results" / "tables" / "manifest.txt"
    tables.parent.mkdir(parents=True)
    tables.write_text(plan.manifest.path.name + "\n")
    write_plan(plan)
    return folder


def test_results_copied_beside_their_plan_count_by_the_digest_they_carry(
    reported,
) -> None:
    """Copying keeps ages, by which Snakemake would make what is older than its code again."""
    one, other = plan_of(CONFIG).artifacts[:2]
    assert one.code.name == other.code.name
    for artifact, digest in ((one, one.code.digest()), (other, "0" * 64)):
        artifact.path.write_text(json.dumps({"code_digest": digest}))
        os.utime(artifact.path, (1, 1))
    write_plan(plan_of(CONFIG))

    assert one.path.stat().st_mtime_ns > one.code.path.stat().st_mtime_ns
    assert other.path.stat().st_mtime == 1


@pytest.mark.parametrize("damage", [b"", b"\xff{", b"[" * 100_000, None])
def test_a_damaged_plan_is_planned_anew(reported, damage: bytes | None) -> None:
    written = {path: path.read_bytes() for path in (reported / PLAN).rglob("*.*")}
    assert {path.parent.name for path in written} == {"plan", "specs", "code"}
    for path in written:
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage)
    write_plan(plan_of(CONFIG))

    due = {path for path in written if path.name.startswith("due-")}
    assert {path: path.read_bytes() for path in written if path not in due} == {
        path: content for path, content in written.items() if path not in due
    }


def due_after_planning(config=CONFIG) -> bool:
    plan = plan_of(config)
    before = plan.manifest.due_path.read_text() if plan.manifest.due_path.exists() else None
    write_plan(plan)
    return plan.manifest.due_path.read_text() != before


def test_tables_are_due_until_every_file_is_there(reported, monkeypatch) -> None:
    monkeypatch.setattr(answers, "kept_answers", dict)  # none comes with the package
    paths = [one.path for one in plan_of(CONFIG).artifacts]
    for path in (paths[0], *sorted(path for path in paths if path.parent.name != "clean")):
        content = path.read_bytes()
        path.unlink()

        assert due_after_planning(), path
        assert due_after_planning(), path
        path.write_bytes(content)
        assert not due_after_planning(), path


@pytest.mark.parametrize("content", [b"manifest-other.json\n", bytes(range(256))])
def test_tables_are_due_when_those_on_disk_are_of_another_config_or_of_none(
    reported, content
) -> None:
    (reported / "results" / "tables" / "manifest.txt").write_bytes(content)

    assert due_after_planning()


def test_ceilings_are_of_the_devices_that_runs_are_measured_on(monkeypatch) -> None:
    monkeypatch.setattr(planner, "cpu_name", lambda: "AMD EPYC")
    monkeypatch.setattr(planner, "available_cores", lambda: 2)
    gpus = [Gpu("GPU-1", "NVIDIA L4", 1), Gpu("GPU-2", "NVIDIA H200", 1)]
    monkeypatch.setattr(planner, "visible_gpus", lambda: gpus)
    (cpu, gpu) = ("cpu-amd-epyc-2-cores", "cuda-nvidia-l4")

    assert plan_sweep(batch_size=[1, 2], instruments=["clean", "phases"]).devices == [cpu]
    assert plan_sweep("cuda").devices == [gpu]
    both = {"sweeps": {"s": SWEEP | {"device": ["cpu", "cuda"]}}}
    assert plan_of(both).devices == [cpu, gpu]
    monkeypatch.setattr(planner, "visible_gpus", list)
    assert plan_sweep("cuda").devices == ["cuda"]


def test_predictions_alone_ask_for_no_ceilings(folder) -> None:
    plan = plan_sweep(instruments=["estimate", "capacity"], target="h200")
    write_plan(plan)

    assert plan.paths(LIMITS) == []
    assert not (folder / "results" / "plan" / "code" / "ceilings.sha256").exists()


def test_a_method_is_verified_once_for_all_sizes_of_our_transformer() -> None:
    config = copy.deepcopy(CONFIG)
    sizes = {"vocab_size": 16, "d_model": 8, "layers": 1, "heads": 2}
    config["sweeps"]["two"]["model"] = ["small", "1b", sizes]

    assert [path.stem for path in plan_of(config).paths(VERDICT)] == [
        "built-in-opacus-hooks",
        "built-in-standard",
    ]


def test_a_target_settles_the_device_whatever_is_here() -> None:
    plan = plan_sweep("cuda", target=["h200", "cpu", None], instruments="estimate")

    assert {(e.target, e.device) for e in plan.experiments.values()} == {
        ("h200", "cuda"),
        ("cpu", "cpu"),
        (None, "cuda"),
    }


def test_a_target_may_be_a_mapping_and_is_one_value() -> None:
    mapping = {"memory_bytes": "24GiB", "flops_per_s": 1e14, "bandwidth_bytes_per_s": 1e12}
    spelled_out = mapping | {"flops_per_s": dict.fromkeys(RATED, 1e14)}
    sweep = SWEEP | {"instruments": "estimate", "target": ["h200", mapping, spelled_out]}
    plan = plan_of({"sweeps": {"s": sweep}})

    assert len(plan.manifest.runs) == 2
    sizes = {
        e.target if isinstance(e.target, str) else e.target.memory_bytes
        for e in plan.experiments.values()
    }
    assert sizes == {"h200", 24 * 2**30}
    excluded = {"sweeps": {"s": sweep}, "exclude": [{"target": mapping}]}
    (kept,) = plan_of(excluded).experiments.values()
    assert kept.target == "h200"


@pytest.mark.parametrize("current", [True, False])
def test_an_answer_that_comes_with_the_package_is_no_more_to_do(
    folder, monkeypatch, current
) -> None:
    plan = plan_of(PRICED)
    (one,) = (a for a in plan.artifacts if a.path.parent.name == "capacity")
    digest = one.code.digest() if current else "0" * 64
    kept = f'{{"code_digest": "{digest}"}}'
    monkeypatch.setattr(answers, "kept_answers", lambda: {one.path.name: kept})
    write_plan(plan)

    assert (folder / one.path).is_file() == current
    if current:
        assert (folder / one.path).stat().st_mtime_ns > one.code.path.stat().st_mtime_ns


def test_files_beyond_the_plan_are_found_and_no_others(folder) -> None:
    plan = plan_of(CONFIG)
    write_plan(plan)
    wanted = plan.manifest.runs[0].path(folder)
    stale = folder / "results" / "clean" / "tiny-standard-b9-t8-00000000.r0.json"
    stale_log = folder / "results" / "logs" / "clean" / "tiny-standard-b9-t8-00000000.r0.log"
    stale_verdict = folder / "results" / "verify" / "built-in-microbatch.json"
    stale_ceilings = folder / "results" / "ceilings" / "cuda-another.json"
    stale_ceilings_log = folder / "results" / "logs" / "ceilings" / "cuda-another.log"
    stale_trace = folder / "results" / "traces" / stale.stem.removesuffix(".r0") / "r0" / "x.gz"
    beyond = [stale, stale_log, stale_verdict, stale_ceilings, stale_ceilings_log, stale_trace]
    (name,) = plan.devices
    kept_log = folder / "results" / "logs" / "ceilings" / f"{name}.log"
    report = folder / "results" / "report.md"
    trace = folder / traces_path(plan.manifest.runs[0].id, 0) / "x.gz"
    kept = [wanted, kept_log, report, trace, *(folder / one.path for one in plan.artifacts[1:])]
    for path in beyond + kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")

    assert files_beyond(folder, [plan]) == sorted(beyond)


@pytest.mark.parametrize("name", ["config.yaml", "thorough.yaml", "smoke.yaml", "reference.yaml"])
def test_shipped_configs_plan(name: str) -> None:
    path = Path(__file__).parents[2] / "config" / name

    assert plan_of(yaml.safe_load(path.read_text())).manifest.runs
