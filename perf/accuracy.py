"""Does the timeline see every byte, and does an estimate say the same without running?

All in bytes. Gap is the allocator's peak less the timeline's; changed by looking is what the
attached timeline adds to the allocator's peak.

For every method and shape, two fresh processes. The first follows the allocator through a
plain run, then records the memory of the same step, then estimates it. The second follows the
allocator while memory is recorded, to see whether the timeline changes what it looks at. Writes a
table and fails where a bound is missed:

    python perf/accuracy.py --output perf/accuracy.md
"""

import argparse
import itertools
import json
import subprocess
import sys
from typing import Any

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.reconciliation import bound_bytes
from dpprof.experiments.records.step_costs import Memory
from dpprof.measure.devices.cpu import CpuRecorder
from dpprof.measure.instruments import memory, phases
from dpprof.measure.instruments.opening import open_experiment
from dpprof.predict.estimate import estimate
from dpprof.predict.memory.cpu_workspaces import CPU_WORKSPACES
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.tracing import TimelineRecorder, record_timelines
from dpprof.subjects.setup import set_up
from dpprof.system.console import say
from script import ignore, lay_out, make_parser, publish

NO_AUTOCAST = ("opacus-ew", "opacus-per-layer")
SHAPES = (
    *((model, *shape) for model in ("tiny", "small") for shape in ((4, 128), (4, 512), (8, 256))),
    ("medium", 2, 256),
)


def look_three_ways(experiment: Experiment) -> dict[str, Any]:
    """Follow the allocator, record, estimate: the peaks and components of one step."""
    truth = _memory(phases.measure(experiment, ignore).memory)
    recorded = _memory(memory.measure(experiment, ignore).memory)
    guess = _memory(estimate(experiment, ignore).memory)
    assert truth.peak_allocated_bytes is not None
    assert recorded.at_peak is not None
    assert recorded.attribution is not None
    assert guess.at_peak is not None
    components = recorded.at_peak.components
    return {
        "allocator": truth.peak_allocated_bytes,
        "allocator_all": max(
            truth.peak_allocated_bytes, truth.first_step_peak_allocated_bytes or 0
        ),
        "memory": recorded.peak_allocated_bytes,
        "sum": sum(components.values()),
        "bound": bound_bytes(experiment, truth.peak_allocated_bytes),
        "estimate_equal": (guess.peak_allocated_bytes, guess.first_step_peak_allocated_bytes)
        == (recorded.peak_allocated_bytes, recorded.first_step_peak_allocated_bytes)
        and guess.at_peak.components == components,
        "evidence": recorded.attribution.evidence,
    }


def look_at_the_looking(experiment: Experiment) -> dict[str, Any]:
    """Follow the allocator while memory is recorded."""
    method, device = open_experiment(experiment)
    allocator = CpuRecorder()
    recorder = Recorder(is_there=lambda tensor, _: not tensor.is_meta, workspaces=CPU_WORKSPACES)
    with recorder:
        training = set_up(experiment, method, device.torch_device, lambda *_: None)
        timeline_recorder = TimelineRecorder(recorder, training.step, ignore)
        with allocator.window("all"):
            record_timelines(timeline_recorder, training.batch, experiment.warmup_steps + 1)
    return {"attached": allocator.close().peaks["all"].allocated_bytes}


def _memory(memory: Memory | None) -> Memory:
    assert memory is not None
    return memory


def run_case(fields: dict[str, Any]) -> dict[str, Any]:
    """Look at a case, in two fresh processes."""
    sizes: dict[str, Any] = {}
    for way in ("three-ways", "attached"):
        command = [sys.executable, __file__, "--child", way, json.dumps(fields)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(f"{fields}: {ended.stderr}")
        sizes |= json.loads(ended.stdout.splitlines()[-1])
    return sizes


def tell(fields: dict[str, Any], sizes: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Make a row of the table, and say whether all held."""
    gap = sizes["allocator"] - sizes["memory"]
    changed = sizes["attached"] - sizes["allocator_all"]
    phase_only = sizes["evidence"]["phase"] / sizes["memory"]
    held = (
        abs(gap) <= sizes["bound"]
        and changed == 0
        and sizes["sum"] == sizes["memory"]
        and sizes["estimate_equal"]
    )
    cells = (
        f"{fields['model']} B{fields['batch_size']} T{fields['seq_len']} {fields['dtype']}",
        fields["method"],
        f"{sizes['allocator']:,}",
        f"{gap:,}",
        f"{changed:,}",
        "equal" if sizes["estimate_equal"] else "differs",
        f"{phase_only:.2%}",
    )
    return cells, held


def main() -> None:
    """Run every case, or be the child that looks at one."""
    parser = make_parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--methods", nargs="+", default=registry.names("methods"))
    parser.add_argument("--models", nargs="+", default=["tiny", "small", "medium"])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        way, fields = arguments.child
        look = look_three_ways if way == "three-ways" else look_at_the_looking
        print(json.dumps(look(Experiment.model_validate_json(fields))))
        return
    rows = []
    missed = 0
    for dtype, shape, method in itertools.product(arguments.dtypes, SHAPES, arguments.methods):
        model, batch_size, seq_len = shape
        has_no_autocast = dtype == "bfloat16" and method in NO_AUTOCAST
        if model not in arguments.models or has_no_autocast:
            continue
        fields = {"model": model, "method": method, "device": "cpu", "dtype": dtype}
        fields |= {"batch_size": batch_size, "seq_len": seq_len}
        # With more noise adaptive clipping would ask for more samples.
        fields |= {"warmup_steps": 2, "timed_steps": 1, "noise_multiplier": 0.1}
        row, held = tell(fields, run_case(fields))
        missed += not held
        rows.append(row)
        say(" | ".join(row))
    heads = ("case", "method", "allocator", "gap", "changed by looking", "estimate")
    table = "\n".join(lay_out((*heads, "by phase alone"), rows))
    publish(__doc__, table, arguments.output)
    if missed:
        sys.exit(f"{missed} cases missed a bound")


if __name__ == "__main__":
    main()
