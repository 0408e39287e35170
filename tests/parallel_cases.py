"""What ranks do in tests of noise, communication and disagreement; each function runs on each."""

import io
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from parallel_training import (
    BOUND,
    WAYS,
    Case,
    Parts,
    Trained,
    build,
    distribute,
    draw_data,
    losses_of,
    make_mesh,
    named,
    train,
    train_ranks,
    whole,
)
from small_models import Small, draw
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from dpprof.predict.memory.exchanges import COLLECTIVES
from dpprof.private.engine.engine import Clipping
from dpprof.private.noise.noise import NoiseOfStep
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.noise.strategies import Strategy, make_strategy
from dpprof.private.norms import rounding
from dpprof.private.ranks import shards
from dpprof.private.substitutes import substitute

SIGMA, EXPECTED = 2.0, 4


def prepare(
    case: Case, model: nn.Module | None = None, **settings: Any
) -> tuple[nn.Module, Clipping, NoisyOptimizer]:
    """Make a distributed model, its clipping and its optimizer."""
    model = distribute(build(case), case) if model is None else model
    clipping = WAYS[case.way](model, settings.pop("bound", BOUND))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"noise_multiplier": SIGMA, "expected_batch_size": EXPECTED} | settings
    return model, clipping, NoisyOptimizer(sgd, clipping, **settings)


def rank() -> int:
    """Return this rank."""
    return distributed.get_rank()


class Wide(nn.Module):
    """A model with enough parameters to judge their noise."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(100, 200, bias=False, dtype=dtype)])
        self.last = nn.Linear(200, 103, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return one loss for each sample."""
        return self.last(self.blocks[0](x)).abs().square().mean(1)


def distribute_wide(make: Callable[[], Wide], kind: str) -> nn.Module:
    """Let all ranks train a wide model."""
    torch.manual_seed(1)
    model = make()
    if kind == "alone":
        return model
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = make_mesh(kind)
    fully_shard(model.blocks[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def draw_noise(
    kind: str, *, seeded: bool, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], bytes]:
    """Take two steps on batches without samples: their gradients are noise alone."""
    model = distribute_wide(partial(Wide, dtype), kind)
    generator = torch.Generator().manual_seed(5) if seeded else None
    case = Case(kind=kind)
    _, clipping, optimizer = prepare(case, model, generator=generator)
    steps = []
    for _ in range(2):
        clipping.backward(model(torch.ones(1, 100, dtype=dtype))[:0])
        optimizer.step()
        steps.append(torch.cat([whole(p.grad).flatten() for p in model.parameters()]))
        optimizer.zero_grad()
    return steps, optimizer.keys.secret


def correlate_noise(kind: str, strategy: Strategy) -> tuple[list[Tensor], list[Tensor], int]:
    """Take all steps of a strategy: without samples, and with the same draw in every element.

    Returns the gradients of both, and how many elements this rank keeps.
    """
    case, rows = Case(kind=kind), []
    draw = NoiseOfStep._add_draw

    def add_alike(noise: Any, summed: Tensor, factor: float) -> None:
        summed.mul_(factor).add_(noise._std * math.cos(step))

    for samples, add_draw in ((0, draw), (2, add_alike)):
        model = distribute_wide(partial(Wide, torch.float64), kind)
        _, clipping, optimizer = prepare(case, model, strategy=strategy)
        steps = []
        with substitute(NoiseOfStep, "_add_draw", add_draw):
            for step in range(strategy.steps):
                x = (step + torch.arange(400.0).view(4, 100)).cos().double()
                own = x if kind == "alone" else x[2 * rank() : 2 * rank() + 2]
                clipping.backward(model(own)[: samples if kind != "alone" else 2 * samples])
                optimizer.step()
                steps.append(torch.cat([whole(p.grad).flatten() for p in model.parameters()]))
                optimizer.zero_grad()
        rows.append(steps)
    assert optimizer.buffers is not None
    return rows[0], rows[1], sum(kept.numel() for kept in optimizer.buffers.kept)


class Mixing(Wide):
    """Centres what it computes over the samples."""

    def forward(self, x: Tensor) -> Tensor:
        """Return one loss for each sample."""
        h = self.blocks[0](x)
        return self.last(h - h.mean(0)).square().mean(1)


def mix_samples(case: Case, counts: tuple[int, ...]) -> None:
    """Clip a batch of so many samples on each rank, which the model mixes."""
    model = distribute_wide(Mixing, case.kind)
    _, clipping, _ = prepare(case, model)
    clipping.backward(model(torch.randn(counts[rank()], 100)))


class Collectives(TorchDispatchMode):
    """Records the collectives that run within, and how many elements each was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note a collective."""
        name = COLLECTIVES.get(func._opname) if func.namespace == "c10d" else None
        if name is not None:
            given = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            self.calls.append((name, max(one.numel() for one in given)))
        return func(*args, **(kwargs or {}))


def record_collectives(case: Case, parts: Parts) -> tuple[list[Any], list[Any]]:
    """Record the collectives of an ordinary step, and of a private one on a batch in parts.

    Both are third ones: before, DDP plans its buckets, small ones here, and ranks verify a batch.
    """
    options = {"bucket_cap_mb": 0.004} if case.kind == "ddp" else {}
    with substitute(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1000):
        found = [*_record_collectives(case, parts, options)]
    return found[0], found[1]


def _record_collectives(case: Case, parts: Parts, options: dict[str, Any]) -> list[list[Any]]:
    ordinary = distribute(build(case), case, **options)
    private, clipping, optimizer = prepare(case, distribute(build(case), case, **options))
    for _ in range(3):
        with Collectives() as of_ordinary:
            losses_of(ordinary, case, [rank()]).sum().backward()
        ordinary.zero_grad()
        with Collectives() as of_private:
            for at, samples in enumerate(parts):
                optimizer.signal_skip_step(at < len(parts) - 1)
                clipping.backward(losses_of(private, case, samples))
                optimizer.step()
                optimizer.zero_grad()
    return [of_ordinary.calls, of_private.calls]


def hold_one_sum(case: Case) -> tuple[list[int], int]:
    """Count the whole sums that are there whenever one is copied to be reduced; and all sums."""
    model, clipping, _ = prepare(case)
    there: list[weakref.ref[Tensor]] = []
    counts = []

    def write(part: Any, summed: Tensor, *arguments: Any, **named: Any) -> None:
        there.append(weakref.ref(summed))
        counts.append(sum(one() is not None for one in there))
        original(part, summed, *arguments, **named)

    original = shards._write
    with substitute(shards, "_write", write):
        clipping.backward(losses_of(model, case, [0, 1]))
    return counts, len(list(model.parameters()))


def train_in_precision(case: Case, steps: list[list[Parts]], dtype: torch.dtype) -> Trained:
    """Train with parameters gathered in another dtype; FSDP would reduce in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.bfloat16)
    model = distribute(build(case), case, mp_policy=policy)
    return train(model, case, [parts[rank()] for parts in steps])


def train_measuring_alone(case: Case, steps: list[list[Parts]]) -> Trained:
    """Train where all samples of one rank are measured and added one by one."""
    with substitute(rounding, "MOST", 1e-3 if rank() else rounding.MOST):
        return train_ranks(case, steps)


def train_sharded_by_columns(case: Case, steps: list[list[Parts]]) -> Trained:
    """Shard matrices whose second axis allows it there."""
    size = distributed.get_world_size()

    def place(parameter: nn.Parameter) -> Shard | None:
        even = parameter.dim() > 1 and parameter.shape[1] % size == 0
        return Shard(1) if even else None

    model = distribute(build(case), case, shard_placement_fn=place)
    return train(model, case, [parts[rank()] for parts in steps])


def take_a_step(case: Case, change: str) -> None:
    """Take a step after a change on rank 1 alone."""
    other = rank() == 1
    settings = {
        "bound": {"bound": 2 * BOUND},
        "noise": {"noise_multiplier": 0.1},
        "size": {"expected_batch_size": 5},
        "strategy": {"strategy": make_strategy("banded", steps=4, bands=2)},
    }
    given = settings.get(change, {}) if other else {}
    model, clipping, optimizer = prepare(case, **given)
    if change == "a batch that is thrown away":
        settings = {"strategy": make_strategy("banded", steps=4, bands=2)}
        model, clipping, optimizer = prepare(case, **settings)
        for _ in range(2):
            clipping.backward(losses_of(model, case, [rank()]))
            optimizer.step()
            optimizer.zero_grad()
        if other:
            optimizer.buffers.begin_anew()
    if change == "frozen" and other:
        next(model.parameters()).requires_grad_(False)
    if change == "parts" and other:
        optimizer.signal_skip_step()
    optimizer.steps += change == "steps" and other
    clipping.backward(losses_of(model, case, [rank()]))
    optimizer.step()


def resume(
    case: Case, strategy: Strategy | None = None
) -> tuple[list[dict[str, Tensor]], list[Any], str]:
    """Train on noise, and once more from this rank's state; and load the state of the other rank.

    Returns the weights and the generator's state after both, and what was refused.
    """

    def go_on(model: nn.Module, clipping: Clipping, optimizer: NoisyOptimizer) -> None:
        for _ in range(2):
            for parts_follow in (True, False):
                optimizer.signal_skip_step(parts_follow)
                clipping.backward(losses_of(model, case, [rank()]))
                optimizer.step()
                optimizer.zero_grad()

    whole_run, other_run = (prepare(case, strategy=strategy) for _ in range(2))
    go_on(*whole_run)
    file = io.BytesIO()
    torch.save([whole_run[0].state_dict(), whole_run[2].state_dict(exact=True)], file)
    go_on(*whole_run)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    model, _, optimizer = other_run
    model.load_state_dict(weights)
    optimizer.load_state_dict(state, exact=True)
    go_on(*other_run)
    found = [{name: whole(p) for name, p in named(run[0])} for run in (whole_run, other_run)]
    privacy = [run[2].state_dict(exact=True)["privacy"] for run in (whole_run, other_run)]
    made_with = state["privacy"]["made_with"]
    made_with["rank"] = 1 - made_with["rank"]
    try:
        optimizer.load_state_dict(state, exact=True)
    except ValueError as error:
        return found, privacy, str(error)
    return found, privacy, ""


def reshard_onto_fewer() -> None:
    """Reshard after forward onto half of the ranks."""
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4), reshard_after_forward=2)))
    WAYS["flash-bk"](model, 1.0)


class Skips(nn.Module):
    """One unit of FSDP, in which rank 1 does not run a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return one loss for each sample."""
        x = self.first(x)
        return (x if rank() == 1 else self.second(x)).square().sum(1)


def skip_a_layer(way: str) -> None:
    """Run another layer on rank 1."""
    model = fully_shard(Skips())
    clipping = WAYS[way](model, 1.0)
    clipping.backward(model(torch.ones(2, 3)))


def reduce_late(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Announce another part after the last backward and take it back: sums are not lost."""
    found = []
    for announced in (False, True):
        model, clipping, optimizer = prepare(case, noise_multiplier=0.0)
        if announced:
            optimizer.signal_skip_step()
        clipping.backward(losses_of(model, case, [rank()]))
        optimizer._step_skip_queue.clear()
        optimizer.step()
        found.append({name: whole(p.grad) for name, p in named(model)})
    return found[0], found[1]


def forget_a_part(case: Case) -> float:
    """Leave a batch after its first part; returns the largest element of the next gradient."""
    model, clipping, optimizer = prepare(case)
    optimizer.signal_skip_step()
    clipping.backward(losses_of(model, case, [rank()]))
    optimizer.step()
    sgd = torch.optim.SGD(model.parameters())
    again = NoisyOptimizer(sgd, clipping, noise_multiplier=0.0, expected_batch_size=1)
    clipping.backward(losses_of(model, case, []))
    again.step()
    return max(float(whole(p.grad).abs().max()) for p in model.parameters())


def run_loop(code: str, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Run a loop of the documents; returns the weights before and after, and batch sizes."""
    case = Case(kind=kind)
    model: Any = build(case)
    before = {name: whole(p) for name, p in named(model)}
    if kind == "ddp":
        sharding = "for block in model.blocks:\n    fully_shard(block)\nfully_shard(model)\n"
        assert sharding in code
        code = code.replace(sharding, "model = DistributedDataParallel(model)\n")
    sizes: list[int] = []
    names = {
        "model": model,
        "dataset": TensorDataset(*draw_data()),
        "sample_rate": 1 / 12,
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    }
    backward = Clipping.backward

    def counted(clipping: Clipping, losses: Tensor) -> None:
        sizes.append(len(losses))
        backward(clipping, losses)

    with (
        substitute(distributed, "init_process_group", lambda: None),
        substitute(Clipping, "backward", counted),
    ):
        exec(compile(code, "documents", "exec"), names)  # noqa: S102
    trained: Any = names["model"]
    return before, {name: whole(p) for name, p in named(trained)}, sizes


def clip_layers(kinds: list[tuple[str, bool]], variant: str) -> list[float]:
    """Clip half a batch in each kind of layer; returns the errors of the sums of all ranks."""
    errors = []
    for kind, bias in kinds:
        for way in WAYS.values():
            sums = []
            for samples in (slice(None), slice(1) if rank() == 1 else slice(1, 4)):
                torch.manual_seed(0)
                model = Small(kind, 6, 9, bias=bias, variant=variant).double()
                ids, labels, weights = (part[samples] for part in draw(4, 5))
                if samples != slice(None):
                    fully_shard(model.body)
                    fully_shard(model)
                clipping = way(model, BOUND)
                clipping.backward(model.losses(ids, labels, weights.double()))
                sums.append([whole(p.grad) for p in clipping.parameters])
            errors.append(max(float((a - b).abs().max()) for a, b in zip(*sums, strict=True)))
    return errors


def train_after_ordinary_steps(case: Case, steps: list[list[Parts]], forward: bool) -> Trained:
    """Train privately a model that was run before; and with uncommon options of DDP."""
    model = build(case)
    options = {}
    if case.kind == "ddp":
        options = {"find_unused_parameters": forward, "gradient_as_bucket_view": True}
        model.register_buffer("one_more", torch.ones(3))  # which DDP would broadcast
    model = distribute(model, case, **options)
    for _ in range(2):
        losses_of(model, case, [rank()]).sum().backward()
    model.zero_grad()
    if forward:
        losses_of(model, case, [rank()])
    return train(model, case, [parts[rank()] for parts in steps])
