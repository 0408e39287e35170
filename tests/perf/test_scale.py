"""What perf/scale.py claims, and that it measures what it says."""

import sys

import pytest
from fresh_process import run_captured

import scale
from scale import Row, find_broken
from script import Cost, run


def test_a_process_is_charged_for_what_its_children_take(tmp_path) -> None:
    work = "x = bytearray(100 * 2**20); sum(range(2 * 10**6))"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}], check=True)"
    busy, idle = (run(["-c", code], tmp_path) for code in (child, "pass"))

    assert busy.peak_mib - idle.peak_mib == pytest.approx(100, abs=20)
    assert busy.cpu_s > idle.cpu_s


def test_a_command_that_fails_says_why(tmp_path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 3: what went wrong"):
        run(["-c", "print('what went wrong'); raise SystemExit(3)"], tmp_path)


@pytest.mark.parametrize(
    ("plan", "report", "peak_mib", "broken"),
    [
        (2.2, 20.0, 1023.0, []),
        (2.21, 20.0, 1023.0, ["second plan: 2.21 times bare, not at most 2.2"]),
        (2.2, 20.1, 1023.0, ["report: 20.1 times the import, not at most 20.0"]),
        (2.2, 20.0, 1024.0, ["report: 1024 MiB, not below 1024"]),
    ],
)
def test_a_claim_is_broken_just_beyond_its_limit(plan, report, peak_mib, broken) -> None:
    planning = [Row("second plan", Cost(1.0, 100.0), plan)]
    reporting = [Row("all of them", Cost(1.0, peak_mib), report)]

    assert find_broken(planning, reporting) == broken


@pytest.mark.slow
def test_fifty_experiments_are_planned_and_reported(tmp_path) -> None:
    output = tmp_path / "scale.md"
    options = ["--jobs=50", "--results=50", "--rounds=1", f"--output={output}"]
    done = run_captured([sys.executable, scale.__file__, *options])

    # With so few, what every process takes outweighs what the experiments do.
    assert done.returncode == 0 or "times" in done.stderr.splitlines()[-1], done.stderr
    told = output.read_text(encoding="utf-8")
    for name in ("bare", "first plan", "second plan", "tables", "figure tradeoff", "report"):
        assert f"| {name} | " in told
