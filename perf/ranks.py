"""Predicted times of training steps on many GPUs beside what others published.

    export PYTHONPATH=src
    python perf/ranks.py --output perf/ranks.md --figure perf/ranks.png

Every row of published_ranks.csv is here. No predicted median was fitted to one; the spread of an
H100's clocks, which makes intervals wider, was chosen after they were seen. What is not predicted
says why. Operators are those of PyTorch's eager mode under FSDP2: steps that were
compiled are told apart, and count in no figure but their own. FSDP1 has no copies into and out of
flat buffers, which are predicted for its rows all the same. llm-foundry's rows gather a block of
backward when the one before it has ended, which is Composer's default (BACKWARD_POST), and their
attention is a Triton kernel of 2023, which the paper of FlashAttention-2 has measured. A trace of
8 ranks stands for those of more, whose shards are smaller. Left out: clipping of the gradient,
loading of data. Where a network is not stated, that of usual nodes is taken. ``--traces FOLDER``
keeps traces between runs.
"""

import csv
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dpprof.ask.questions import make_experiment
from dpprof.experiments.config import registry
from dpprof.experiments.config.parallel import GPUS_PER_NODE, Parallel
from dpprof.experiments.config.target import Target
from dpprof.predict.estimate import trace_steps
from dpprof.predict.memory.events import Op
from dpprof.predict.memory.streams import COPIES_OUT, JOINS
from dpprof.predict.step_time.predict import predict_step
from dpprof.system.console import say
from older_kernels import KERNELS
from published_points import Point, draw, summarise
from script import ignore, make_parser, publish

HERE = Path(__file__).parent
_LIKE = "h100"
"""Traces for it stand for those of all targets: kernels of attention have other names there, which
times do not depend on."""

_COLUMNS = (
    *("source", "GPU", "GPUs", "model", "T", "batch", "published (ms)", "predicted (ms)"),
    *("90 % interval", "exchanges", "waits", "error"),
)
_NOTE = """\
An asterisk marks an interval that what was published lies outside of. A step exchanges while its
GPU waits for other ranks, and waits while the host has not issued anything. A batch is samples of a
GPU times those that are added up."""


class Row(NamedTuple):
    """A published step."""

    facts: dict[str, str]

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return int(self.facts["gpus"])

    @property
    def parallel(self) -> Parallel | None:
        """The ranks; None for one GPU."""
        if self.gpus == 1:
            return None
        kind, _, kept = self.facts["sharding"].partition(" ")
        network = self.facts["network_gb_per_s"]
        fields: dict[str, Any] = {"reshard_after_forward": False} if kept else {}
        return Parallel(
            kind=kind,
            world_size=self.gpus,
            gpus_per_node=self.gpus // int(self.facts["nodes"]),
            network_gb_per_s=float(network) if network else None,
            **fields,
        )

    @property
    def published_s(self) -> float:
        """Seconds of a step."""
        return float(self.facts["step_s"])


class Compared(NamedTuple):
    """A published step, and what was predicted for it."""

    row: Row
    point: Point
    communication: float
    waiting: float


def read_rows() -> list[Row]:
    """Read all rows."""
    with (HERE / "published_ranks.csv").open(encoding="utf-8") as file:
        return [Row(one) for one in csv.DictReader(file)]


def trace(row: Row, traces: Path | None) -> Sequence[Op]:
    """Return the operators of a step on one of 8 ranks, or of one process."""
    facts = row.facts
    sharding = "none" if row.parallel is None else facts["sharding"]
    kinds = ("model", "micro_batch", "seq_len", "parameters", "checkpointing")
    adapted = ["lora"] if facts["lora"] else []
    name = "-".join([sharding, *(facts[one] for one in kinds), *adapted])
    kept = traces and traces / name
    if kept and kept.is_file():
        ops: Sequence[Op] = pickle.loads(kept.read_bytes())  # noqa: S301 (written here)
        return ops
    models = yaml.safe_load((HERE / "published_ranks.yaml").read_text("utf-8"))
    fields = {
        "model": yaml.safe_dump(models[facts["model"]], default_flow_style=True, width=10_000),
        "method": "standard",
        "batch_size": facts["micro_batch"],
        "seq_len": facts["seq_len"],
        "dtype": "bfloat16",
        "checkpointing": facts["checkpointing"],
        "target": _LIKE,
    }
    if facts["parameters"] == "bfloat16":
        fields |= {"parameters_dtype": "bfloat16", "trained_dtype": "bfloat16"}
    if facts["lora"]:
        fields["lora"] = facts["lora"]
    if row.parallel is not None:
        # HSDP shards as FSDP does; its all-reduces need replicas.
        ranks = 2 * GPUS_PER_NODE if sharding == "hsdp" else GPUS_PER_NODE
        resharding = ",reshard_after_forward=false" if "kept" in sharding else ""
        fields["parallel"] = f"kind={row.parallel.kind},world_size={ranks}{resharding}"
    ops = trace_steps(make_experiment(fields), ignore).steady.ops
    if kept:
        kept.write_bytes(pickle.dumps([op._replace(call="") for op in ops]))
    return ops


def share_out(op: Op, row: Row) -> Op:
    """Return an operator of one of 8 ranks with the shards of a row's ranks."""
    parallel = row.parallel
    if parallel is None:
        return op
    reads, writes = list(op.reads), list(op.writes)
    if row.facts["reduce"] == "bfloat16" and ("reduce_scatter" in op.name or "cat" in op.name):
        writes = [(number, size // 2) for number, size in writes]
        if "reduce_scatter" in op.name:
            reads = [(number, size // 2) for number, size in reads]
    if op.phase == "step" or op.name == "fsdp.all_gather_copy_in":
        smaller = parallel.shards / GPUS_PER_NODE
        reads, writes = (
            [(n, int(size / smaller)) for n, size in moved] for moved in (reads, writes)
        )
    elif op.name.startswith("c10d.") and len(reads) > 1:
        whole = max(size for _, size in reads)
        reads = [(n, size if size == whole else whole // parallel.shards) for n, size in reads]
    return op._replace(reads=reads, writes=writes)


def gather_late(ops: Sequence[Op]) -> list[Op]:
    """Move each gather of backward behind the block before it, as FSDP1's BACKWARD_POST does."""
    found: list[Op] = []
    held: list[Op] = []
    for at, op in enumerate(ops):
        if op.name == JOINS:
            found += held
            held = []
        is_gather = op.name in ("fsdp.all_gather_copy_in", "c10d._allgather_base_")
        is_cast = op.name == "_foreach_copy_" and ops[at + 1].name == "fsdp.all_gather_copy_in"
        is_next = op.phase == "backward" and _is_joined_first(ops, at)
        if (is_gather or is_cast) and is_next:
            held.append(op)
        else:
            found.append(op)
    return found + held


def _is_joined_first(ops: Sequence[Op], at: int) -> bool:
    """Return whether a block's gradients are joined before what is gathered is copied out."""
    names = (op.name for op in ops[at:])
    return next((one for one in names if one in (JOINS, COPIES_OUT)), COPIES_OUT) == JOINS


def predict(row: Row, traces: Path | None) -> Compared:
    """Predict a row's step."""
    target = registry.load("targets", row.facts["target"])
    assert isinstance(target, Target)
    ops = [share_out(op, row) for op in trace(row, traces)]
    if row.facts["prefetch"] == "after":
        ops = gather_late(ops)
    times = KERNELS[row.facts["attention"]]
    step = predict_step(ops, "bfloat16", target, parallel=row.parallel, model_of=times)
    median = step.median + (int(row.facts["accumulation"]) - 1) * (step.median - step.update)
    longer = median / step.median
    point = Point(
        *(row.facts["source"], row.published_s),
        *(median, step.low * longer, step.high * longer),
        is_compiled=row.facts["compiled"] == "yes",
    )
    return Compared(row, point, step.communication_share or 0.0, step.waiting_share)


def find_series(compared: Sequence[Compared]) -> Iterator[tuple[Compared, Compared]]:
    """Yield the fewest and the most GPUs of what differs in the number of GPUs alone."""
    same = ("source", "target", "model", "micro_batch", "seq_len", "checkpointing", "compiled")
    groups: dict[tuple[str, ...], list[Compared]] = defaultdict(list)
    for one in compared:
        groups[tuple(one.row.facts[name] for name in same)].append(one)
    for group in groups.values():
        ordered = sorted(group, key=lambda one: one.row.gpus)
        if ordered[0].row.gpus < ordered[-1].row.gpus:
            yield ordered[0], ordered[-1]


def tokens_per_s(one: Compared, seconds: float) -> float:
    """Return tokens a second of a GPU."""
    facts = one.row.facts
    samples = int(facts["micro_batch"]) * int(facts["accumulation"])
    return samples * int(facts["seq_len"]) / seconds


def tabulate(rows: Sequence[Row], compared: Sequence[Compared]) -> str:
    """Lay out medians, scaling, and every row."""
    lines = [*_summarise(compared), "", "## Scaling", "", *_compare_scaling(compared)]
    lines += ["", "## Rows", ""]
    lines += [_NOTE, "", f"| {' | '.join(_COLUMNS)} |"]
    lines += [f"| --- | --- | ---: | --- |{' ---: |' * (len(_COLUMNS) - 4)}"]
    known = {one.row.facts["id"]: one for one in compared}
    lines += [_lay_out(known[row.facts["id"]]) for row in rows if row.facts["id"] in known]
    lines += ["", "## Not predicted", "", "| row | source | why |", "| --- | --- | --- |"]
    lines += [
        f"| {row.facts['id']} | [{row.facts['source']}]({row.facts['url']}) "
        f"| {row.facts['not_predicted']} |"
        for row in rows
        if row.facts["not_predicted"]
    ]
    return "\n".join(lines)


def _lay_out(one: Compared) -> str:
    facts, point = one.row.facts, one.point
    way = f"{facts['model']}, {facts['sharding']}"
    way += ", LoRA" if facts["lora"] else ""
    way += "" if facts["checkpointing"] == "none" else ", checkpointed"
    way += ", compiled" if point.is_compiled else ""
    cells = [
        f"[{facts['source']}]({facts['url']})",
        facts["target"],
        f"{one.row.gpus}",
        way,
        f"{int(facts['seq_len']):,}",
        f"{facts['micro_batch']} x {facts['accumulation']}",
        f"{one.row.published_s * 1e3:,.0f}",
        f"{point.median * 1e3:,.0f}",
        f"{point.low * 1e3:,.0f} to {point.high * 1e3:,.0f}{'' if point.is_inside else ' *'}",
        f"{one.communication:.0%}",
        f"{one.waiting:.0%}",
        f"{point.error:+.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def _summarise(compared: Sequence[Compared]) -> list[str]:
    eager = [one for one in compared if not one.point.is_compiled]
    groups: dict[str, list[Compared]] = defaultdict(list)
    for one in eager:
        groups[f"{one.row.facts['source']}, {one.row.facts['target']}"].append(one)
    groups["all eager steps"] = eager
    several = [one for one in eager if one.row.gpus > 1]
    groups["all of more than one GPU"] = several
    groups["compiled, predicted as eager"] = [one for one in compared if one not in eager]
    return summarise({name: [one.point for one in group] for name, group in groups.items()})


def _compare_scaling(compared: Sequence[Compared]) -> list[str]:
    lines = [
        "Tokens a second of a GPU with the most GPUs over that with the fewest.",
        "",
        "| source | GPU | model | T | GPUs | published | predicted | points |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    off = []
    for few, most in find_series(compared):
        published = tokens_per_s(most, most.row.published_s) / tokens_per_s(
            few, few.row.published_s
        )
        predicted = tokens_per_s(most, most.point.median) / tokens_per_s(few, few.point.median)
        off.append(abs(predicted - published))
        facts = few.row.facts
        lines.append(
            f"| {facts['source']} | {facts['target']} | {facts['model']} "
            f"| {int(facts['seq_len']):,} | {few.row.gpus} to {most.row.gpus} "
            f"| {published:.0%} | {predicted:.0%} | {100 * (predicted - published):+.0f} |"
        )
    within = sum(one <= 0.08 for one in off)  # noqa: PLR2004
    return [*lines, "", f"{within} of {len(off)} are within 8 points."]


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--figure", type=Path, help="a file for the figure")
    parser.add_argument("--traces", type=Path, help="a folder that keeps traces")
    arguments = parser.parse_args()
    rows = read_rows()
    compared = []
    for row in rows:
        if not row.facts["not_predicted"]:
            compared.append(predict(row, arguments.traces))
            say(f"{row.facts['id']}: {compared[-1].point.error:+.1%}")
    picture = f"\n![{draw.__doc__}]({arguments.figure.name})\n" if arguments.figure else ""
    publish(f"{__doc__}{picture}", tabulate(rows, compared), arguments.output)
    if arguments.figure:
        draw([one.point for one in compared]).savefig(arguments.figure)


if __name__ == "__main__":
    main()
