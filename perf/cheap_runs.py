"""What does a run cost beyond its steps? Whole runs of ``dpprof profile`` beside a bare import.

The bare import is ``python -c "import torch, opacus"``, with which every program of Opacus begins.
A run is the supervisor and its worker, from nothing to the JSON, of two steps of the model tiny:
nothing is subtracted for these. A round is one bare import, another, and one run of each method;
the ratio is within a round. All is CPU time, user and system, of one thread, so that what else
keeps the machine busy counts little.
"""

import json
import tempfile
from pathlib import Path

from dpprof.experiments.config import registry
from dpprof.system.console import say
from interleave import MIN_PAIRS, Comparison, tabulate
from script import IMPORTS, at_least, describe_place, end, make_parser, publish, run

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


def compare(methods: list[str], rounds: int) -> list[Comparison]:
    """Measure every method in each round; returns a row each, after the bare import's."""

    def import_cpu_s() -> float:
        return run(["-c", IMPORTS], Path(tempfile.gettempdir())).cpu_s

    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ("bare", *methods)}
    for number in range(1, rounds + 1):
        bare = import_cpu_s()
        for name, pairs in runs.items():
            value = import_cpu_s() if name == "bare" else run_cpu_s(name)
            pairs.append((value, bare))
            say(f"[{number}/{rounds}] {name}: {value / bare:.2f}")
    return [Comparison(f"{name} / bare", pairs) for name, pairs in runs.items()]


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", **at_least(MIN_PAIRS, 12))
    parser.add_argument("--method", nargs="+", choices=registry.names("methods"), metavar="METHOD")
    arguments = parser.parse_args()
    rows = compare(arguments.method or registry.names("methods"), arguments.rounds)
    table = tabulate(rows, "s")
    steps = f"{STEPS} steps of tiny, B = 2, T = 16, instrument clean"
    text = f"{describe_place('torch', 'opacus')}; {steps}.\n\n{table}"
    publish(__doc__, text, arguments.output, printed=table)
    end(f"not below {CLAIM}", [row.name for row in rows[1:] if row.interval.high >= CLAIM])


if __name__ == "__main__":
    main()
