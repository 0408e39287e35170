"""What recording memory costs: beside a bare step, and beside PyTorch's MemTracker.

Steps alternate in one process: a bare one, one that is recorded with operators counted.
Under fake tensors, where nothing is computed, the recorder stands beside
``torch.distributed._tools.MemTracker``, which adds up the same bytes in fewer op kinds
and counts no FLOPs. The claims: at most 1.5 times a bare step; MemTracker at least 7 times
slower for the standard step and 9 times for per-sample gradients from hooks.
"""

from torch.distributed._tools.mem_tracker import MemTracker

from dpprof.predict.memory.fake_operators import FakeOperators
from dpprof.predict.memory.fake_tensors import fake_tensors
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.tracing import TimelineRecorder
from dpprof.system.console import say
from interleave import MIN_PAIRS, Comparison, Side, measure, prepare, tabulate, timed
from script import at_least, end, ignore, make_parser, publish

REAL = {"model": "small", "batch_size": 4, "seq_len": 256}
FAKE = {"model": "1b", "batch_size": 8, "seq_len": 1024}
AT_MOST = 1.5
AT_LEAST = {"standard": 7.0, "opacus-hooks": 9.0}


def bare_side(fields: dict[str, object], method: str) -> Side:
    """Run steps that nobody watches."""
    training = prepare(fields | {"method": method})
    return timed(lambda: training.step.run(training.batch, ignore))


def recorded_side(
    fields: dict[str, object], method: str, call: FakeOperators | None = None
) -> Side:
    """Run steps whose memory is recorded, operators counted."""
    recorder = Recorder(is_there=lambda tensor, _: not tensor.is_meta, call=call)
    with recorder:
        training = prepare(fields | {"method": method})
        timeline_recorder = TimelineRecorder(recorder, training.step, ignore)

    def run() -> None:
        with recorder:
            timeline_recorder.run(training.batch, counting=True)

    return timed(run)


def tracked_side(fields: dict[str, object], method: str) -> Side:
    """Run steps under MemTracker, as its documentation shows."""
    training = prepare(fields | {"method": method})
    tracker = MemTracker()
    tracker.track_external(training.step.module, training.step.optimizer)

    def run() -> None:
        tracker.reset_mod_stats()
        with tracker:
            training.step.run(training.batch, ignore)

    return timed(run)


def compare_real(method: str, pairs: int) -> Comparison:
    """Put recorded steps beside bare ones."""
    recorded, bare = recorded_side(REAL, method), bare_side(REAL, method)
    for side in (recorded, bare, recorded, bare):
        side()
    return measure(f"recorded / bare, {method}, small", recorded, bare, pairs, say)


def compare_fake(method: str, pairs: int) -> Comparison:
    """Put MemTracker's steps beside recorded ones, under fake tensors."""
    with fake_tensors() as mode:
        tracked = tracked_side(FAKE, method)
        recorded = recorded_side(FAKE, method, FakeOperators(mode))
        for side in (tracked, recorded):
            side()
        return measure(f"MemTracker / recorded, {method}, fake 1b", tracked, recorded, pairs, say)


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", **at_least(MIN_PAIRS, 12))
    arguments = parser.parse_args()
    real = [compare_real(m, arguments.pairs) for m in ("standard", "opacus-hooks", "opacus-ghost")]
    fake = {method: compare_fake(method, arguments.pairs) for method in AT_LEAST}
    publish(__doc__, tabulate([*real, *fake.values()], "ms", 1e3), arguments.output)
    missed = [row.name for row in real if row.ratio > AT_MOST]
    missed += [row.name for method, row in fake.items() if row.ratio < AT_LEAST[method]]
    end("beyond its claim", missed)


if __name__ == "__main__":
    main()
