import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpprof.launch.device_lock import hold_one, lock_path


def never() -> None:
    raise AssertionError("waited for a lock that is free")


class WaitedError(Exception):
    pass


def give_up() -> None:
    raise WaitedError


def test_a_free_lock_is_taken_at_once_and_given_back() -> None:
    for _ in range(2):
        with hold_one(["free"], never) as (position, _descriptor):
            assert position == 0


def test_a_taken_lock_is_waited_for() -> None:
    with hold_one(["busy"], never), pytest.raises(WaitedError), hold_one(["busy"], give_up):
        pass


def test_the_first_free_device_is_chosen() -> None:
    with hold_one(["gpu-a"], never), hold_one(["gpu-a", "gpu-b"], never) as (position, _):
        assert position == 1


def test_a_child_that_inherits_the_lock_keeps_it_when_the_parent_lets_go() -> None:
    with hold_one(["inherited"], never) as (_, descriptor):
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=(descriptor,)
        )
    with pytest.raises(WaitedError), hold_one(["inherited"], give_up):
        pass
    child.kill()
    child.wait()
    with hold_one(["inherited"], never):
        pass


def test_another_users_lock_file_can_be_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DPPROF_LOCK_DIR", str(tmp_path))
    lock_path("shared").touch()
    lock_path("shared").chmod(0o444)

    with hold_one(["shared"], never):
        pass


def test_a_strict_umask_does_not_lock_other_users_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DPPROF_LOCK_DIR", str(tmp_path))
    before = os.umask(0o077)
    try:
        with hold_one(["strict"], never):
            assert lock_path("strict").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_the_lock_is_machine_wide_whatever_tmpdir_is(monkeypatch) -> None:
    monkeypatch.delenv("DPPROF_LOCK_DIR")
    monkeypatch.setenv("TMPDIR", "/elsewhere")

    assert lock_path("cpu") == Path("/tmp/dpprof-cpu.lock")  # noqa: S108


def test_a_device_name_cannot_leave_the_folder() -> None:
    assert lock_path("../../etc/x").parent == Path(os.environ["DPPROF_LOCK_DIR"])


def test_an_empty_folder_for_locks_is_the_usual_one(monkeypatch) -> None:
    monkeypatch.setenv("DPPROF_LOCK_DIR", "")

    assert lock_path("cpu") == Path("/tmp/dpprof-cpu.lock")  # noqa: S108


def test_a_missing_folder_for_locks_is_told_with_the_variable(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("DPPROF_LOCK_DIR", str(tmp_path / "missing"))

    with (
        pytest.raises(FileNotFoundError, match=r"DPPROF_LOCK_DIR.*missing/dpprof-cpu\.lock"),
        hold_one(["cpu"], lambda: None),
    ):
        pass
