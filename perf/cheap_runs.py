"""What does a run cost beyond its steps? Whole runs of ``dpprof profile`` beside a bare import.

The bare import is ``python -c "import torch, opacus"``, with which every program of Opacus begins.
A run is the supervisor and its worker, from nothing to the JSON, of two steps of the model tiny:
nothing is subtracted for these. A round is one bare import, another, and one run of each method;
the ratio is within a round. All is CPU time, user and system, of one thread, so that what else
keeps the machine busy counts little.
"""

import json
import tempfile
from functools import partial
from pathlib import Path

from dpprof.experiments.config import registry
from dpprof.system.console import say
from interleave import MIN_PAIRS, compare, conclude, take_turns
from script import IMPORTS, at_least, describe_place, make_parser, run

RUN = "from dpprof.ask.commands.main import main; main()"
STEPS = 2
CLAIM = 1.3
"""The upper end of every interval of a run over a bare import must lie below this."""


def run_cpu_s(method: str) -> float:
    """Run the method's experiment and return the CPU seconds.

    Raises:
        RuntimeError: The experiment ended in another way than ok.
    """
    options = {"model": "tiny", "method": method, "batch-size": 2, "seq-len": 16, "device": "cpu"}
    options |= {"warmup-steps": 1, "timed-steps": STEPS - 1, "cpu-threads": 1}
    options["noise-multiplier"] = 0.1  # more is too much for a batch of 2 of opacus-adaptive
    options |= {"output": "run.json", "log": "run.log"}
    words = (f"--{name}={value}" for name, value in options.items())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = run(["-c", RUN, "profile", *words], folder).cpu_s
        outcome = json.loads((folder / "run.json").read_bytes())["outcome"]
    if outcome != "ok":
        raise RuntimeError(f"the run of {method} ended as {outcome}")
    return seconds


def import_cpu_s() -> float:
    """Return the CPU seconds of a bare import."""
    return run(["-c", IMPORTS], Path(tempfile.gettempdir())).cpu_s


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", **at_least(MIN_PAIRS, 12))
    parser.add_argument("--method", nargs="+", choices=registry.names("methods"), metavar="METHOD")
    arguments = parser.parse_args()
    methods = arguments.method or registry.names("methods")
    sides = {"bare": import_cpu_s, "another bare": import_cpu_s}
    sides |= {method: partial(run_cpu_s, method) for method in methods}
    rows = compare(take_turns(sides, arguments.rounds, 0, say), "bare")
    steps = f"{STEPS} steps of tiny, B = 2, T = 16, instrument clean"
    place = f"{describe_place('torch', 'opacus')}; {steps}"
    conclude(__doc__, place, rows, arguments.output, CLAIM)


if __name__ == "__main__":
    main()
