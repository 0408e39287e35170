"""What comes of hostile input, each in a process of its own: ``apart.py KIND=COUNT ...``.

Hypothesis draws the cases. Prints what was wrong with the simplest one that it found of each sort,
and how many cases of each kind there were. A process is forked once everything is imported, so
that hundreds of them take no time.
"""

import functools
import os
import socket
import sys
from pathlib import Path
from typing import Any

from damaged_files import Reading, make_reading
from hostile import make_command, make_config
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from judging import Kind, judge

from dpprof.ask import predictions, verify
from dpprof.ask.commands import ceilings, profile
from dpprof.ask.commands.main import COMMANDS, import_command, main
from dpprof.experiments.config.config_files import read_config_file
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning.planner import make_plan, write_plan
from dpprof.results.report.page.write import bundle_charts
from dpprof.system.files import check_writable


def plan(content: bytes) -> int:
    """Plan a config as snakemake and prune.py do; 1 where it is refused."""
    Path("my.yaml").write_bytes(content)
    try:
        write_plan(make_plan(read_config_file(Path("my.yaml")), device=lambda: "cpu"))
    except InputError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        Path("my.yaml").unlink()
    return 0


def command(arguments: list[str]) -> int:
    """Run ``dpprof``; return its exit status. Nothing is measured."""
    try:
        main(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 3
    return 0


def furnish(_case: Any) -> None:
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


KINDS = {
    "configs": Kind(make_config, furnish, plan, (1,), writes=False, letters=6000),
    "commands": Kind(make_command, furnish, command, (1, 2), writes=False, letters=6000),
    "files": Kind(
        make_reading,
        Reading.furnish,
        lambda reading: reading.run(command),
        (0, 1, 2),
        writes=True,
        letters=500_000,
    ),
}


def prepare() -> None:
    """Import what cases need; put the check of the output in place of what measures."""

    def measure(output: Path) -> None:
        check_writable(output)
        sys.exit(0)

    for name in COMMANDS:
        import_command(name)
    bundle_charts()
    profile.supervise = predictions.supervise = lambda *given, **_: measure(given[3])
    verify.verify_apart = lambda _model, _method, output: measure(output)
    ceilings.measure_apart = lambda _device, output, *_: measure(output)


@functools.cache
def _sort(name: str) -> type[AssertionError]:
    """Return a type of error for each sort of outcome, since Hypothesis tells apart by type."""
    return type(name, (AssertionError,), {})


def search(kind: Kind, count: int) -> int:
    """Judge cases that Hypothesis draws; return how many there were.

    Raises:
        AssertionError: Something was wrong with one; several in an ``ExceptionGroup``.
    """
    judged = 0

    @settings(
        max_examples=count,
        phases=[Phase.generate, Phase.shrink],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def is_right(draw: Any) -> None:
        nonlocal judged
        judged += 1
        case = kind.make(draw)
        if wrong := judge(kind, case):
            raise _sort(wrong.partition(":")[0])(f"{str(case)[:2000]}\n{wrong}")

    is_right()
    return judged


if __name__ == "__main__":
    prepare()
    for argument in sys.argv[1:]:
        name, _, number = argument.partition("=")
        print(f"{name} {search(KINDS[name], int(number))}", flush=True)
