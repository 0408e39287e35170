"""What a private step costs beside the same step of an older version of dpprof.

``python perf/against.py --base REVISION`` checks that revision out beside this one. Each version
has a process of its own, and the two take steps in turn. CPU time of one thread is compared, so
that what else keeps the machine busy counts little. Where memory lies differs from process to
process, and by some percent what a step costs: each shape is measured in ``STARTS`` pairs of fresh
processes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import geometric_mean

from dpprof.system.console import say
from dpprof.system.paths import PACKAGE
from interleave import MIN_PAIRS, Comparison, measure, prepare, tabulate, timed
from script import describe_place, end, ignore, make_parser, publish

METHODS = ("flash", "flash-bk")
SHAPES = (("small", 128, 4), ("small", 1_024, 1), ("medium", 256, 1))
STARTS = 3
CLAIM = 1.02
"""The most that a method's ratio may be, in the geometric mean over shapes."""


class Version:
    """A process that takes steps of one version on demand."""

    def __init__(self, package: Path, experiment: dict[str, object]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(experiment)],
            env=os.environ | {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.take_step()  # the first warms up

    def take_step(self) -> float:
        """Take a step, and return the CPU seconds that it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


def serve(experiment: str) -> None:
    """Take a step for each line of input, and tell how long each took."""
    training = prepare(json.loads(experiment))
    run = timed(lambda: training.step.run(training.batch, ignore), clock=time.process_time)
    for _ in sys.stdin:
        print(run(), flush=True)


def compare(base: Path, method: str, shape: tuple[str, int, int], pairs: int) -> Comparison:
    """Take steps of both versions in turn."""
    model, tokens, samples = shape
    fields = {"model": model, "method": method, "batch_size": samples, "seq_len": tokens}
    name = f"{method}, {model}, T = {tokens}, B = {samples}"
    measured: list[tuple[float, float]] = []
    for _ in range(STARTS):
        this, other = (Version(package, fields) for package in (PACKAGE, base))
        try:
            measured += measure(name, this.take_step, other.take_step, pairs, say).pairs
        finally:
            this.end()
            other.end()
    return Comparison(name, measured)


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--base", help="the revision to compare with")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    git = [shutil.which("git") or "git", "-C", str(PACKAGE.parent), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        subprocess.run([*git, "add", "--detach", base, arguments.base], check=True)
        try:
            package = base / "src" / "dpprof"
            ratios = {
                method: [compare(package, method, shape, arguments.pairs) for shape in SHAPES]
                for method in METHODS
            }
        finally:
            subprocess.run([*git, "remove", "--force", base], check=True)
    rows = [row for rows in ratios.values() for row in rows]
    means = {m: geometric_mean(row.ratio for row in rows) for m, rows in ratios.items()}
    claims = [f"* {m}, geometric mean: {r:.3f} (claim: <= {CLAIM})" for m, r in means.items()]
    place = f"{describe_place('torch')}; B is {arguments.base}."
    text = "\n".join([place, "", tabulate(rows, "ms", 1e3), "", *claims])
    publish(__doc__, text, arguments.output)
    slower = [method for method, ratio in means.items() if ratio > CLAIM]
    end(f"more than {CLAIM} times as long as before", slower)


if __name__ == "__main__":
    main()
