"""What children are asked to do, and how tests wait for them."""

import multiprocessing
import os
import time
from pathlib import Path

import psutil

from dpprof.experiments.launch.device_slots import cpu_slot
from dpprof.experiments.launch.isolated import Ended, isolate

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


def wait_for(condition, seconds: float = 120) -> None:
    for _ in range(int(seconds * 20)):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("what was waited for did not happen")


def refuse(*_: object) -> None:
    raise TimeoutError


def kill(*_arguments: str) -> None:
    os.kill(os.getpid(), 9)


def hang(*_arguments: str) -> None:
    multiprocessing.Event().wait()


def fail(*_arguments: str) -> None:
    raise ValueError("no")


def measure_briefly(device: str) -> object:
    """Measure a device's ceilings at small sizes, where that takes a tenth of the time."""
    from dpprof.measure.devices import limits  # noqa: PLC0415 (it imports torch)

    limits.EXTENTS = {device: limits.Extent((256, 512), (2**24,), budget_s=0.03, longest_s=0.6)}
    return limits.measure(device)


def time_operators(budget_s: int, *specs: str) -> object:
    """Time the operators of experiments, after a look at one small step in place of four."""
    from dpprof.measure.instruments import operators  # noqa: PLC0415 (it imports torch)

    operators._REAL = operators._TINY | {"method": "standard"}
    operators._TINY_METHODS = ("standard",)
    return operators.measure(budget_s, *specs)


def tell_half_a_character() -> str:
    return "half a \ud800 character"


def ask(function: str, *arguments: str, output: Path, timeout_s: float = 60) -> Ended[str]:
    with isolate(output, [cpu_slot(3)], lambda: "digest", __file__) as isolation:
        isolation.begin(PYTHONPATH=f"{HERE.parent / 'src'}:{HERE}")
        return isolation.run(str, f"children:{function}", *arguments, timeout_s=timeout_s)
