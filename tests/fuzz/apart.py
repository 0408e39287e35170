"""What comes of hostile input, each in a process of its own: ``apart.py configs FIRST COUNT``.

Prints a line for each seed that was not refused as it should be. A process is forked once
everything is imported, so hundreds of them take no time.
"""

import contextlib
import os
import resource
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from hostile import SCRIPTS, make_command, make_config

from dpprof.planning.planner import make_plan
from dpprof.spec.config_files import read_config_file
from dpprof.spec.validation import InputError

SECONDS = 30
BYTES = 2**30
LETTERS = 6000


def plan(seed: int) -> int:
    """Plan a config as snakemake and prune.py do; 1 where it is refused."""
    Path("my.yaml").write_bytes(make_config(seed))
    try:
        make_plan(read_config_file(Path("my.yaml")), device=lambda: "cpu")
    except InputError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        Path("my.yaml").unlink()
    return 0


def command(seed: int) -> int:
    """Run a script; returns its exit status."""
    script, *arguments = make_command(seed)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(SCRIPTS))
    try:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 3
    return 0


def furnish() -> None:
    """Put into the working folder what hostile command lines name."""
    Path("folder").mkdir()
    Path("file").write_text("")
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("device")
    Path("to-device").symlink_to("/dev/null")
    Path("to-nothing").symlink_to("nowhere/at/all")
    Path("binary").write_bytes(bytes(range(256)))
    Path("deep").write_bytes(b'{"a": ' * 100_000)
    Path("digits").write_bytes(b'{"runs": ' + b"9" * 10_000 + b"}")
    Path("cut").write_bytes(b'{"schema_version": 1, "runs": [')


def judge(case: Callable[[int], int], seed: int) -> str | None:
    """Run a case in a process; returns what is wrong with how it was refused."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.chdir(folder):
            furnish()
        before = sorted((path, path.lstat().st_mode) for path in Path(folder).rglob("*"))
        with tempfile.TemporaryFile() as said:
            started = time.monotonic()
            child = os.fork()
            if child == 0:
                _be_the_child(case, seed, folder, said.fileno())
            _, status, usage = os.wait4(child, 0)
            seconds = time.monotonic() - started
            said.seek(0)
            text = said.read().decode()
        after = sorted((path, path.lstat().st_mode) for path in Path(folder).rglob("*"))
    code = os.waitstatus_to_exitcode(status)
    wrong = {
        f"exit status {code}": code not in (1, 2),
        "a traceback": "Traceback" in text,
        "nothing said": not text.strip(),
        "codes for a terminal": not all(c.isprintable() or c == "\n" for c in text),
        f"{len(text):,} letters": len(text) > LETTERS,
        f"{seconds:.0f} s": seconds > SECONDS,
        f"{usage.ru_maxrss // 1024:,} MiB": usage.ru_maxrss * 1024 > BYTES,
        "files changed": before != after,
    }
    found = [name for name, is_so in wrong.items() if is_so]
    return f"{case.__name__} {seed}: {', '.join(found)}: {text[-500:]!r}" if found else None


def _be_the_child(case: Callable[[int], int], seed: int, folder: str, output: int) -> None:
    code = 3
    try:
        os.chdir(folder)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (4 * BYTES, 4 * BYTES))
        signal.alarm(2 * SECONDS)
        code = case(seed)
    except BaseException:  # noqa: BLE001 (a traceback is what is looked for)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Run from the command line."""
    case = {"configs": plan, "commands": command}[sys.argv[1]]
    first, count = map(int, sys.argv[2:])
    for seed in range(first, first + count):
        if wrong := judge(case, seed):
            print(wrong, flush=True)


if __name__ == "__main__":
    main()
