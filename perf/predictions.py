"""Predicts the rows of evidence.csv: steps of one GPU and of many, and numbers of private runs."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.parallel import GPUS_PER_NODE, Parallel
from dpprof.experiments.records.advice import StepParts
from dpprof.experiments.records.result import PredictedTime
from dpprof.experiments.records.step_costs import Work
from dpprof.predict import capacity
from dpprof.predict.estimate import estimate, trace_steps
from dpprof.predict.flops.cost import Cost
from dpprof.predict.memory.caching_allocator import CachingAllocator, OutOfMemoryError
from dpprof.predict.memory.events import Op
from dpprof.predict.memory.exchanges import COPIES_OUT, JOINS
from dpprof.predict.step_time.gpu_model import GpuModel
from dpprof.predict.step_time.op_time import Z_90, OpTime
from dpprof.predict.step_time.predict import predict_step
from dpprof.results.analysis.advice.ratios import split_step
from evidence import MODELS, Row, Source, find_target
from script import ignore

_FORWARD, _BACKWARD = 1.4, 2.0
_FEWEST, _MOST = 1.3, 2.5
_SPREAD = math.log(_MOST / _FEWEST) / 2 / Z_90


class TritonAttention(GpuModel):
    """Attention by FlashAttention's Triton kernel of 2023, on an A100 or H100.

    Dao 2023, "FlashAttention-2", section 4.1, on an A100: FlashAttention-2, whose speed current
    libraries have at least, is 1.3 to 1.5 times as fast forward, about 2 times backward, and 1.3 to
    2.5 times over all lengths and widths.
    """

    def predict(self, cost: Cost, moved_bytes: int) -> OpTime:
        """Predict the device's time for one call of an operator."""
        time = super().predict(cost, moved_bytes)
        if cost.attention is None:
            return time
        slower = _BACKWARD if cost.attention.is_backward else _FORWARD
        spread = math.hypot(time.spread, _SPREAD)
        return time._replace(seconds=slower * time.seconds, spread=spread)


KERNELS = {"": GpuModel, "triton-2023": TritonAttention}
"""The times of operators by what a row says of its attention: libraries of today, or of then."""


def predict_shared_step(row: Row) -> PredictedTime:
    """Predict a step on one of its GPUs, as ``dpprof estimate`` does, with its share of an update.

    GPUs that share the optimizer's states update a part each, and one update serves all batches
    whose gradients were added up.
    """
    target, dtype = find_target(row.target), row.settings.get("dtype", "bfloat16")
    if row.model in MODELS:
        share = row.settings.get("gpus", 1) * row.settings.get("accumulation", 1)
        fields = {"dtype": dtype, "target": row.target}
        ops = [_shrink(op, share) if op.phase == "step" else op for op in _trace(row, fields)]
    else:
        module, _, function = row.model.partition(".")
        run = getattr(import_module(f"published.programs.{module}"), function)
        recording = import_module("published.recording")
        ops = recording.record_step(run, target, **row.settings["program"])
    return predict_step(ops, dtype, target, model_of=KERNELS[row.settings.get("attention", "")])


def _trace(row: Row, fields: dict[str, Any]) -> Sequence[Op]:
    shape = {name: row.settings[name] for name in ("batch_size", "seq_len")}
    fields |= {"model": MODELS[row.model], "method": row.method, "device": "cuda"}
    fields["checkpointing"] = row.settings.get("checkpointing", "none")
    return _trace_experiment(Experiment.model_validate(shape | fields))


@lru_cache(maxsize=8)
def _trace_experiment(experiment: Experiment) -> Sequence[Op]:
    return trace_steps(experiment, ignore).steady.ops


def _shrink(op: Op, by: float) -> Op:
    """Return an operator with a part of what it reads and writes."""
    reads, writes = (
        [(number, int(size / by)) for number, size in moved] for moved in (op.reads, op.writes)
    )
    return op._replace(reads=reads, writes=writes)


_LIKE = "h100"
"""Traces for it stand for those of all targets: kernels of attention have other names there, which
times do not depend on."""


def find_ranks(row: Row) -> Parallel | None:
    """Return the ranks of a row; None for one GPU."""
    settings = row.settings
    if settings["gpus"] == 1:
        return None
    kind, _, kept = settings["sharding"].partition(" ")
    fields: dict[str, Any] = {"reshard_after_forward": False} if kept else {}
    return Parallel(
        kind=kind,
        world_size=settings["gpus"],
        gpus_per_node=settings["gpus"] // settings["nodes"],
        network_gb_per_s=settings.get("network_gb_per_s"),
        **fields,
    )


def predict_rank_step(row: Row) -> PredictedTime:
    """Predict a step on one of many GPUs, of all batches that are added up."""
    settings, ranks = row.settings, find_ranks(row)
    ops = [_share_out(op, row, ranks) for op in _trace(row, _describe_rank(row, ranks))]
    if settings.get("prefetch") == "after":
        ops = gather_late(ops)
    kernels = KERNELS[settings.get("attention", "")]
    target = find_target(row.target)
    step = predict_step(ops, "bfloat16", target, parallel=ranks, model_of=kernels)
    median = step.median + (settings["accumulation"] - 1) * (step.median - step.update)
    longer = median / step.median
    ends = {"low": step.low * longer, "high": step.high * longer}
    return step.model_copy(update={"median": median, **ends})


def _describe_rank(row: Row, ranks: Parallel | None) -> dict[str, Any]:
    """Describe one of 8 ranks, or one process."""
    fields = {"dtype": "bfloat16", "target": _LIKE, "lora": row.settings.get("lora")}
    if row.settings.get("parameters") == "bfloat16":
        fields |= {"parameters_dtype": "bfloat16", "trained_dtype": "bfloat16"}
    if ranks is not None:
        # HSDP shards as FSDP does; its all-reduces need replicas.
        replicas = 2 if ranks.kind == "hsdp" else 1
        kept = {name: getattr(ranks, name) for name in ("kind", "reshard_after_forward")}
        fields["parallel"] = {**kept, "world_size": replicas * GPUS_PER_NODE}
    return fields


def _share_out(op: Op, row: Row, ranks: Parallel | None) -> Op:
    """Return an operator of one of 8 ranks with the shards of a row's ranks."""
    if ranks is None:
        return op
    reads, writes = list(op.reads), list(op.writes)
    is_reduction = "reduce_scatter" in op.name
    if row.settings["reduce"] == "bfloat16" and (is_reduction or "cat" in op.name):
        writes = [(number, size // 2) for number, size in writes]
        if is_reduction:
            reads = [(number, size // 2) for number, size in reads]
    op = op._replace(reads=reads, writes=writes)
    if op.phase == "step" or op.name == "fsdp.all_gather_copy_in":
        return _shrink(op, ranks.shards / GPUS_PER_NODE)
    if op.name.startswith("c10d.") and len(reads) > 1:
        whole = max(size for _, size in reads)
        reads = [(n, size if size == whole else whole // ranks.shards) for n, size in reads]
    return op._replace(reads=reads)


def gather_late(ops: Sequence[Op]) -> list[Op]:
    """Move each gather of backward behind the block before it, as FSDP1's BACKWARD_POST does."""
    ordered: list[Op] = []
    held: list[Op] = []
    for at, op in enumerate(ops):
        if op.name == JOINS:
            ordered += held
            held = []
        is_gather = op.name in ("fsdp.all_gather_copy_in", "c10d._allgather_base_")
        is_cast = op.name == "_foreach_copy_" and ops[at + 1].name == "fsdp.all_gather_copy_in"
        is_next = op.phase == "backward" and _is_joined_first(ops, at)
        if (is_gather or is_cast) and is_next:
            held.append(op)
        else:
            ordered.append(op)
    return ordered + held


def _is_joined_first(ops: Sequence[Op], at: int) -> bool:
    """Return whether a block's gradients are joined before what is gathered is copied out."""
    names = (op.name for op in ops[at:])
    return next((name for name in names if name in (JOINS, COPIES_OUT)), COPIES_OUT) == JOINS


_OF_TEXT = ("bert", "gpt2", "roberta")
"""How names of models begin whose samples are tokens; other samples are images."""

_SMALLEST = {"bert": 16}  # the batch from which a source doubles it; 64 for other models


class Training(NamedTuple):
    """What is predicted of a private run, but for the batch."""

    source: Source
    target: str
    model: str
    method: str
    size: int  # height and width of images, or tokens
    steps: int

    @classmethod
    def of(cls, row: Row) -> "Training":
        """Return that of a row."""
        sizes = row.settings["size"], row.settings["steps"]
        return cls(row.source, row.target, row.model, row.method, *sizes)

    @property
    def is_experiment(self) -> bool:
        """Whether dpprof's commands take it; otherwise it is a program."""
        return self.model in MODELS and not self.method.startswith("two-passes")

    def experiment(self, batch_size: int) -> Experiment:
        """Describe a Hugging Face model as dpprof's commands do."""
        model = dict(MODELS[self.model])
        if model["hf"] == "gpt2" and self.method != "standard":
            model["tie_word_embeddings"] = False
        size = {"image_size" if model["hf"] == "vit-base" else "seq_len": self.size}
        return Experiment(
            model=model,
            method=self.method,
            batch_size=batch_size,
            dtype=self.source.dtype,
            attention="eager",
            device="cuda",
            target=self.target,
            **size,
        )


@cache
def _record(training: Training, batch_size: int) -> Any:
    return import_module("published.recording").record(
        import_module("published.programs.private").training,
        find_target(training.target),
        with_handles=False,  # every source's PyTorch was older than 1.13
        B=batch_size,
        optimizer=training.source.optimizer,
        **{name: getattr(training, name) for name in ("model", "method", "size", "steps")},
    )


@cache
def _predict_training(training: Training, batch_size: int) -> tuple[PredictedTime, list[Work]]:
    """Predict a step, and sum what its operators do."""
    if training.is_experiment:
        ops = trace_steps(training.experiment(batch_size), ignore).steady.ops
    else:
        ops = _record(training, batch_size).ops
    work: dict[tuple[Any, Any], Counter[str]] = defaultdict(Counter)
    for op in ops:
        moved = (sum(size for _, size in sized) for sized in (op.reads, op.writes))
        sizes = dict(zip(("read", "written"), moved, strict=True))
        work[op.phase, op.op_kind].update(ops=1, flops=op.cost.flops, **sizes)
    step = predict_step(ops, training.source.dtype, find_target(training.target))
    return step, [Work(phase=phase, op_kind=kind, **sums) for (phase, kind), sums in work.items()]


@cache
def _find_largest(training: Training) -> int:
    """Find the largest batch for which the simulated allocator finds room; 0 for none.

    Of a program it is where a line through what two batches reserve reaches the memory: such rows
    were read off figures. Where the source tries powers of 2, each is tried.
    """
    if training.is_experiment:
        largest = capacity.measure(training.experiment(1), ignore).capacity
        assert largest is not None
        return largest.batch_size
    if not training.source.doubles:
        return int(_extend_line(training, 128))
    least = _SMALLEST.get(training.model, 64)
    batch = least * 2 ** max(int(math.log2(max(_extend_line(training, least) / least, 1))), 0)
    while _fits(training, batch):
        batch *= 2
    while batch >= least and not _fits(training, batch):
        batch //= 2
    return batch if batch >= least else 0


def _extend_line(training: Training, least: int) -> float:
    """Return the batch for which a line through two small ones reserves all memory."""
    budget = find_target(training.target).memory_bytes
    first, second = (
        2**20 * _record(training, batch).peak("reserved") for batch in (least, 2 * least)
    )
    return float(least * (1 + (budget - first) / (second - first)))


def _fits(training: Training, batch_size: int) -> bool:
    if training.is_experiment:
        return batch_size <= _find_largest(training)
    allocator = CachingAllocator(find_target(training.target).memory_bytes)
    try:
        for key, size in _record(training, batch_size).changes:
            if size > 0:
                allocator.allocate(key, size)
            else:
                allocator.free(key)
    except OutOfMemoryError:
        return False
    return True


def predict_private(row: Row) -> float:
    """Predict a number of a private run, with times as milliseconds of a sample.

    Where memory ran out while it was timed, the time is infinite if it is predicted to run out.
    """
    training = Training.of(row)
    if row.quantity == "largest batch":
        return _find_largest(training)
    batch_size = int(row.settings["batch_size"])
    if row.quantity == "peak memory":
        return float(_record(training, batch_size).peak("allocated"))
    if row.value is None and not _fits(training, batch_size):
        return math.inf
    return 1e3 * _predict_training(training, batch_size)[0].median / batch_size


def describe_measured(row: Row) -> Experiment:
    """Describe what was measured with ``dpprof profile``."""
    fields = {"model": row.model, "method": row.method, "target": find_target(row.target)}
    return Experiment.model_validate({**fields, "device": "cuda", **row.settings})


def predict_measured(row: Row) -> tuple[PredictedTime, dict[str, int]]:
    """Predict the time of a step and its memory, as ``dpprof estimate`` does."""
    estimated = estimate(describe_measured(row), ignore)
    assert estimated.memory is not None
    assert estimated.time is not None
    assert estimated.time.predicted_step_s is not None
    memory = {
        "peak memory": int(estimated.memory.peak_allocated_bytes or 0),
        "reserved memory": int(estimated.memory.peak_reserved_bytes or 0),
    }
    return estimated.time.predicted_step_s, memory


def split_private(row: Row) -> StepParts:
    """Predict a private step that others published, and split it."""
    batch_size = int(row.settings["batch_size"])
    step, work = _predict_training(Training.of(row), batch_size)
    is_of_text = row.model.startswith(_OF_TEXT)
    like = Experiment(
        model="small" if is_of_text else {"hf": "vit-base"},
        method="standard" if row.method == "standard" else "opacus-hooks",
        batch_size=batch_size,
        dtype=row.source.dtype,
        device="cuda",
        target=find_target(row.target),
        **{"seq_len" if is_of_text else "image_size": row.settings["size"]},
    )
    return split_step(step, work, like, batch_size)._replace(method=row.method)


def split_measured(row: Row) -> StepParts:
    """Predict a step that was measured for dpprof, and split it."""
    experiment = describe_measured(row)
    estimated = estimate(experiment, ignore)
    assert estimated.time is not None
    assert estimated.time.predicted_step_s is not None
    assert estimated.io is not None
    work = estimated.io.by_phase_and_op_kind
    return split_step(estimated.time.predicted_step_s, work, experiment, experiment.batch_size)
