"""A sweep always reaches its report, whatever its experiments do."""

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from checkout import PLUGIN, TABLES, Checkout
from children import wait_for

pytestmark = pytest.mark.workflow


def test_every_way_to_fail_ends_in_a_report_that_lists_it(checkout: Checkout) -> None:
    """What fails is an instrument of another package: it needs no torch."""
    checkout.environment = {"PYTHONPATH": str(PLUGIN)}
    checkout.use("failures.yaml")
    said = checkout.snakemake()

    runs = checkout.table("runs")
    failed = runs[runs["instrument"] != "clean"].set_index("instrument")
    assert failed["outcome"].to_dict() == {
        "test-refuses-memory": "oom",
        "test-sleeps": "timeout",
        "test-measures": "unsupported",
        "test-dies": "killed",
        "test-raises": "crashed",
    }
    assert (len(runs), set(runs.loc[runs["instrument"] == "clean", "outcome"])) == (8, {"ok"})
    assert failed.loc["test-dies", "attempts"] == 2
    report = checkout.report()
    for instrument, run in failed.iterrows():
        (row,) = (
            line
            for line in report.splitlines()
            if line.startswith(f"| {run['experiment_id']} {instrument} r0")
        )
        log = f"results/logs/{instrument}/{run['experiment_id']}.r0.log"
        assert f"| {run['outcome']} |" in row
        assert log in row
        assert (checkout.path / log).is_file()
    assert (checkout.path / "results" / "report.pdf").read_bytes().startswith(b"%PDF")
    assert "<script>" not in (checkout.path / "results" / "report.md").read_text()
    assert not (checkout.path / "pwned").exists()
    verified = checkout.table("methods").set_index("method")["verified"].map(str)
    assert verified.to_dict() == {"standard": "True", "test-dies": "nan", "test-raises": "False"}
    assert "failed: test-raises; not verified: test-dies; marked" in report
    # Progress: every run is announced with its number, and what came of it.
    assert [int(k) for k in re.findall(r"\[(\d)/8\]", said)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "about" in said
    assert "killed after" in said


@pytest.fixture
def sleeping(finished: Checkout) -> Checkout:
    """A finished sweep whose config asks for one run more, which waits until its marker is gone."""
    finished.edit("config/config.yaml", "method: standard\n", "method: [standard, microbatch]\n")
    finished.environment = {"DPPROF_TEST_MARKER": str(finished.path / "reached")}
    return finished


def process_running(script: str, folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = " ".join(process.info["cmdline"] or [])
        if script in command and "bash" not in command and process.info["cwd"] == str(folder):
            found.append(process)
    return [process for process in found if process.parent() not in found]


@pytest.mark.slow
def test_a_supervisor_that_dies_each_time_is_run_by_the_next_snakemake(sleeping: Checkout) -> None:
    marker = sleeping.path / "reached"
    sweep = sleeping.start(TABLES)
    for _ in range(3):
        wait_for(marker.exists)
        finished = sleeping.results()
        (supervisor,) = process_running("scripts/subcommand.py profile", sleeping.path)
        supervisor.kill()
        marker.unlink()  # so that the next attempt waits too
    said, _ = sweep.communicate(timeout=300)

    assert sweep.returncode == 1, said
    others = sleeping.results()
    assert finished.items() <= others.items()
    assert not any("microbatch" in name for name in others)
    sleeping.environment = {}
    sleeping.snakemake(TABLES)
    assert others.items() <= sleeping.results().items()
    assert set(sleeping.table("runs")["outcome"]) == {"ok"}


@pytest.mark.slow  # tests/launch kills workers of one run
def test_a_killed_worker_is_run_again_within_the_sweep(sleeping: Checkout) -> None:
    sweep = sleeping.start(TABLES)
    wait_for((sleeping.path / "reached").exists)
    (worker,) = process_running("dpprof.experiments.launch.worker", sleeping.path)
    worker.kill()
    said, _ = sweep.communicate(timeout=300)

    assert sweep.returncode == 0, said
    runs = sleeping.table("runs").set_index("method")
    assert runs.loc["microbatch", ["outcome", "attempts"]].tolist() == ["ok", 2]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),  # as a machine shuts down
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),  # as it loses its power
    ],
)
def test_after_a_killed_supervisor_then_ctrl_c_or_a_reboot_snakemake_continues(
    sleeping: Checkout, number: int
) -> None:
    marker = sleeping.path / "reached"
    sweep = sleeping.start(TABLES)
    wait_for(marker.exists)
    finished = sleeping.results()
    (supervisor,) = process_running("scripts/subcommand.py profile", sleeping.path)
    supervisor.kill()
    marker.unlink()  # so that the next attempt waits too
    wait_for(marker.exists)
    (worker,) = process_running("dpprof.experiments.launch.worker", sleeping.path)
    os.killpg(sweep.pid, number)
    sweep.communicate(timeout=60)

    assert sweep.returncode != 0
    worker.wait(timeout=10)
    assert sleeping.results() == finished

    if number == signal.SIGKILL:
        assert "cannot be locked" in sleeping.snakemake(TABLES, status=1)
        sleeping.snakemake("--unlock")
    sleeping.snakemake(TABLES)
    assert len(sleeping.results()) == 4
    assert finished.items() <= sleeping.results().items()
    assert set(sleeping.table("runs")["outcome"]) == {"ok"}


def contents(checkout: Checkout) -> dict[str, bytes]:
    """Results without their age: Snakemake touches what a job leaves as it is."""
    return {name: content for name, (_, content) in checkout.results().items()}


def kill_snakemake(sweep: subprocess.Popen[str], number: int) -> None:
    """Kill Snakemake alone, as the kernel would, or as who knows no better."""
    sweep.send_signal(number)
    if number == signal.SIGKILL:
        sweep.wait(timeout=60)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_run_that_outlives_its_snakemake_is_not_measured_again(
    sleeping: Checkout, number: int
) -> None:
    marker = sleeping.path / "reached"
    sweep = sleeping.start(TABLES)
    wait_for(marker.exists)
    (run,) = process_running("scripts/subcommand.py profile", sleeping.path)
    kill_snakemake(sweep, number)
    marker.rename(marker.with_name("let go"))
    sleeping.environment = {}
    run.wait(timeout=120)
    sweep.wait(timeout=120)
    finished = contents(sleeping)
    assert any("microbatch" in name for name in finished)

    said = sleeping.snakemake(TABLES, *(["--nolock"] if number == signal.SIGKILL else []))
    assert finished.items() <= contents(sleeping).items()
    assert "this code has already measured this run; its result is kept" in said
    assert "Nothing to be done" in sleeping.snakemake(TABLES, "-n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "module", "function"),
    [
        ("verify", "measure/verification/verify.py", "def verify(model, method):"),
        ("ceilings", "measure/devices/limits.py", "def measure(name):"),
    ],
)
def test_a_verdict_or_ceilings_under_way_are_made_again_after_a_kill(
    checkout: Checkout, command: str, module: str, function: str
) -> None:
    marker = checkout.path / "reached"
    stop = f"open({str(marker)!r}, 'w').close()\n    import time\n    time.sleep(3600)"
    checkout.edit(f"src/dpprof/{module}", function, f"{function}\n    {stop}")
    sweep = checkout.start(TABLES)
    wait_for(marker.exists)
    finished = checkout.results()
    running = process_running(f"scripts/subcommand.py {command}", checkout.path)
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.wait(timeout=60)
    for process in running:
        process.wait(timeout=60)

    assert not list(checkout.path.glob("results/verify/*.json")) or command != "verify"
    checkout.edit(f"src/dpprof/{module}", f"{function}\n    {stop}", function)
    checkout.snakemake("--unlock")
    checkout.snakemake(TABLES)
    assert finished.items() <= checkout.results().items()
    assert checkout.table("methods")["verified"].all()
    assert not checkout.table("ceilings").empty


@pytest.mark.slow
def test_a_run_under_way_is_waited_for_and_not_measured_again(sleeping: Checkout) -> None:
    marker = sleeping.path / "reached"
    sweep = sleeping.start(TABLES)
    wait_for(marker.exists)
    (run,) = process_running("scripts/subcommand.py profile", sleeping.path)
    kill_snakemake(sweep, signal.SIGKILL)
    sleeping.environment = {}
    sleeping.snakemake("--unlock")
    second = sleeping.start(TABLES)
    assert second.stdout is not None
    waits = next(line for line in second.stdout if "; waiting for" in line)
    marker.rename(marker.with_name("let go"))
    run.wait(timeout=120)
    finished = contents(sleeping)
    said = second.stdout.read()

    assert second.wait(timeout=300) == 0, said
    assert any("microbatch" in name for name in finished)
    assert finished.items() <= contents(sleeping).items()
    assert f"waiting for process {run.pid} (" in waits
    assert "its result is kept" in said


def test_the_old_report_stays_until_there_is_a_new_one(finished: Checkout) -> None:
    names = ("report.md", "report.tex", "report.pdf", "report.json")
    report = {name: (finished.path / "results" / name).read_bytes() for name in names}
    with (finished.path / "src/dpprof/results/report/templates/report.md.j2").open("a") as template:
        template.write("\n")
    stop = "open('results/reached', 'w').close(); import time; time.sleep(3600)\n\n"
    finished.edit("src/dpprof/ask/commands/report.py", "def main", stop + "def main")
    sweep = finished.start()
    wait_for((finished.path / "results" / "reached").exists)
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.communicate(timeout=60)

    for name, content in report.items():
        assert (finished.path / "results" / name).read_bytes() == content
    finished.edit("src/dpprof/ask/commands/report.py", stop, "")
    finished.snakemake("--nolock")
    assert (finished.path / "results" / "report.md").read_bytes() != report["report.md"]


@pytest.mark.slow  # tests/analysis/test_collection.py names and leaves out what is damaged
def test_a_damaged_result_is_named_and_partial_reports_on_the_others(finished: Checkout) -> None:
    (damaged,) = (finished.path / "results" / "clean").glob("*hooks*.json")
    damaged.write_text(damaged.read_text()[:-100])
    said = finished.snakemake(TABLES, status=1)
    assert f"results/clean/{damaged.name}: is not complete JSON" in said
    assert "Traceback" not in said

    (missing,) = (finished.path / "results" / "clean").glob("*-b2-*.json")
    missing.unlink()
    before = finished.results()
    with (finished.path / "src/dpprof/subjects/methods/standard.py").open("a") as method:
        method.write("EDITED = True\n")
    finished.snakemake(TABLES, "--config", "partial=true")

    assert finished.results() == before
    told = finished.table("missing").set_index("experiment_id")["reason"]
    assert told[missing.name.removesuffix(".r0.json")] == "no result yet"
    assert told[damaged.name.removesuffix(".r0.json")].startswith("is not complete JSON")
    assert len(told) == 2
