import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpprof.experiments.launch import device_lock
from dpprof.experiments.launch.device_lock import DeviceBusyError, hold_one, lock_path


def never(*_: object) -> None:
    raise AssertionError("waited for a lock that is free")


class WaitedError(Exception):
    pass


def give_up(*_: object) -> None:
    raise WaitedError


def test_a_free_lock_is_taken_at_once_and_given_back() -> None:
    for _ in range(2):
        with hold_one([["free"]], never) as (position, _descriptor):
            assert position == 0


def test_a_taken_lock_is_waited_for() -> None:
    with hold_one([["busy"]], never), pytest.raises(WaitedError), hold_one([["busy"]], give_up):
        pass


def test_the_first_free_device_is_chosen() -> None:
    with hold_one([["gpu-a"]], never), hold_one([["gpu-a"], ["gpu-b"]], never) as (position, _):
        assert position == 1


def test_a_child_that_inherits_the_lock_keeps_it_when_the_parent_lets_go() -> None:
    with hold_one([["inherited"]], never) as (_, descriptors):
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=descriptors
        )
    with pytest.raises(WaitedError), hold_one([["inherited"]], give_up):
        pass
    child.kill()
    child.wait()
    with hold_one([["inherited"]], never):
        pass


def test_another_users_lock_file_can_be_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DPPROF_LOCK_DIR", str(tmp_path))
    lock_path("shared").touch()
    lock_path("shared").chmod(0o444)

    with hold_one([["shared"]], never):
        pass


def test_a_strict_umask_does_not_lock_other_users_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DPPROF_LOCK_DIR", str(tmp_path))
    before = os.umask(0o077)
    try:
        with hold_one([["strict"]], never):
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
        hold_one([["cpu"]], never),
    ):
        pass


def test_a_wait_is_bounded_and_names_device_holder_and_variable() -> None:
    told: list[tuple[str, float]] = []
    with (
        hold_one([["bounded"]], never),
        pytest.raises(DeviceBusyError) as caught,
        hold_one([["bounded"]], lambda *given: told.append(given), longest_s=1.0),
    ):
        pass

    ((whom, waited_s),) = told
    assert whom.startswith(f"process {os.getpid()} (")
    assert waited_s < 1.0
    assert str(caught.value) == (
        f"bounded: still taken after 1 s, by {whom}; "
        "DPPROF_MAX_WAIT_S says how many seconds to wait"
    )


def test_a_lock_that_comes_free_in_time_is_taken() -> None:
    held = contextlib.ExitStack()
    held.enter_context(hold_one([["short"]], never))

    with hold_one([["short"]], lambda *_: held.close(), longest_s=60.0) as (position, _):
        assert position == 0


def test_the_lock_of_a_holder_that_is_killed_is_taken() -> None:
    code = "import sys; from dpprof.experiments.launch.device_lock import hold_one\n"
    code += "with hold_one([['killed']], lambda *_: None): print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen([sys.executable, "-c", code], **pipes)
    holder.stdout.readline()

    def kill(whom: str, _: float) -> None:
        assert whom.startswith(f"process {holder.pid} (")
        holder.kill()

    with hold_one([["killed"]], kill, longest_s=60.0):
        assert holder.wait() == -9


def test_a_free_device_that_will_not_do_is_let_go_and_looked_at_again(monkeypatch) -> None:
    monkeypatch.setattr(device_lock, "_LOOK_S", 0.0)
    looks: list[tuple[int, int]] = []

    def why_not(position: int, before: int) -> str | None:
        looks.append((position, before))
        return None if len(looks) > 3 else "others"

    told: list[str] = []
    with (
        hold_one([["gpu-a"]], never),
        hold_one(
            [["gpu-a"], ["gpu-b"], ["gpu-c"]], lambda whom, _: told.append(whom), why_not=why_not
        ) as (position, _),
    ):
        assert position == 2
        with hold_one([["gpu-b"]], never):
            pass
    assert looks == [(1, 0), (2, 1), (1, 0), (2, 1)]
    assert told[0].endswith(" and others and others")


def test_locks_are_taken_all_or_none() -> None:
    def take_one() -> None:
        with hold_one([["one"]], never):
            raise WaitedError

    with (
        hold_one([["two"]], never),
        pytest.raises(WaitedError),
        hold_one([["one", "two"]], lambda *_: take_one()),
    ):
        pass


def test_who_shares_keeps_out_who_does_not() -> None:
    with (
        hold_one([["cpu"]], never, shared=True),
        hold_one([["cpu"]], never, shared=True),
        pytest.raises(DeviceBusyError),
        hold_one([["cpu"]], never, longest_s=0.0),
    ):
        pass
