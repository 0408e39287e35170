"""What children are asked to do, and how tests wait for them."""

import os
import time
from pathlib import Path

import psutil

from dpprof.launch.isolated import ask_child
from dpprof.launch.device_lock import hold_one

HERE = Path(__file__).parent


def brood(folder: str) -> None:
    """Start four that sleep, the last in a session of its own, and name them and oneself."""
    for number in range(4):
        if os.fork() == 0:
            if number == 3:
                os.setsid()
            (Path(folder) / f"{number}.pid").write_text(str(os.getpid()))
            time.sleep(3600)
    (Path(folder) / "asked.pid").write_text(str(os.getpid()))
    wait_for(lambda: len(running(Path(folder))) == 5)


def tell(folder: str) -> str:
    brood(folder)
    return "told"


def die(folder: str) -> None:
    brood(folder)
    os._exit(7)


def sleep(folder: str) -> None:
    brood(folder)
    time.sleep(3600)


def shout() -> None:
    for _ in range(300):
        os.write(1, b"x" * 10**6)


def running(folder: Path) -> list[psutil.Process]:
    pids = [int(text) for path in folder.glob("*.pid") if (text := path.read_text())]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def wait_for(condition) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("what was waited for did not happen")


def refuse() -> None:
    raise TimeoutError


def ask(function: str, *arguments: str):
    with hold_one(["cpu"], refuse) as (_, lock_fd):
        limits = {"timeout_s": 60, "lock_fd": lock_fd}
        return ask_child("question", "children", function, *arguments, **limits)
