import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning import job_environment
from dpprof.experiments.planning.job_environment import offer_interpreter

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "envs" / "dpprof.yaml"


@pytest.fixture
def planning(monkeypatch):
    """The module, whose memory of an environment is undone."""
    monkeypatch.setattr(job_environment, "_pinned", {})
    return job_environment


def test_installed_versions_count_without_their_build(planning, monkeypatch) -> None:
    found = {"torch": "2.13.0+cu130", "opacus": None}
    monkeypatch.setattr(planning, "package_versions", lambda _: found)

    assert planning.versions_in_jobs(["torch", "opacus"]) == {"torch": "2.13.0", "opacus": None}


def test_the_pins_of_an_environment_replace_what_is_installed(planning, tmp_path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("dependencies:\n  - pip:\n      - torch==2.12.1 # of the cluster\n")
    planning.expect_environment(path)

    assert planning.versions_in_jobs(["torch", "opacus"]) == {"torch": "2.12.1", "opacus": None}


def test_an_environment_without_torch_is_refused(planning, tmp_path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("dependencies:\n  - torch\n")

    with pytest.raises(InputError, match=r"other\.yaml: pins no torch; add a line such as torch=="):
        planning.expect_environment(path)


@pytest.fixture
def locked() -> dict[str, str]:
    """The versions of the lock, by package."""
    lock = (ROOT / "requirements.lock").read_text()
    return {name.lower(): version for name, version in re.findall(r"(?m)^(\S+)==(\S+)$", lock)}


def test_the_shipped_environment_pins_the_versions_of_the_lock(locked) -> None:
    pinned = dict(job_environment._PIN.findall(ENVIRONMENT.read_text()))

    assert len(pinned) == 17
    assert pinned == {name: locked[name] for name in pinned}


@pytest.mark.parametrize("path", ["/usr/bin", "", None])
def test_jobs_find_the_python_that_plans_without_an_activated_environment(
    monkeypatch, tmp_path, path
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", path or "")
    if path is None:
        monkeypatch.delenv("PATH")
    monkeypatch.setattr(sys, "executable", str(python))
    offer_interpreter()

    assert shutil.which("python") == str(python)
    assert os.environ["PATH"].split(os.pathsep)[1:] == ([path] if path else [])


def test_where_there_is_no_python_at_all_it_is_told(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(Path(tmp_path) / "python3"))

    with pytest.raises(InputError, match=r"no program named python beside .*/python3 or on the PA"):
        offer_interpreter()
