import re
from pathlib import Path

import pytest

from dpprof.planning import libraries
from dpprof.spec.validation import InputError

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "envs" / "dpprof.yaml"


@pytest.fixture
def planning(monkeypatch):
    """The module, whose memory of an environment is undone."""
    monkeypatch.setattr(libraries, "_pinned", {})
    return libraries


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


def test_planning_for_the_shipped_environment_is_planning_for_the_lock(planning) -> None:
    """So a result counts whichever of the two it was measured in."""
    names = ("torch", "opacus", "transformers", "peft", "vl-convert-python")
    installed = planning.versions_in_jobs(names)
    planning.expect_environment(ENVIRONMENT)

    assert planning.versions_in_jobs(names) == installed
    assert None not in installed.values()


def test_the_shipped_environment_pins_the_versions_of_the_lock() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    locked = {name.lower(): version for name, version in re.findall(r"(?m)^(\S+)==(\S+)$", lock)}
    pinned = dict(libraries._PIN.findall(ENVIRONMENT.read_text()))

    assert len(pinned) == 15
    assert pinned == {name: locked[name] for name in pinned}
