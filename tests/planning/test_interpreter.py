import os
import shutil
import sys
from pathlib import Path

import pytest

from dpprof.planning.interpreter import offer_interpreter
from dpprof.spec.validation import InputError


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
