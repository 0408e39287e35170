"""Records everything that leaves a private training's steps, and names what tells of a sample.

Two trainings on neighbouring data, one of which has nothing in the place of a sample, run with the
same random numbers. Every step starts from the same weights, because the recorder undoes what the
optimizer did: then the steps' gradients differ by the clipped sums alone, and all else is equal.
"""

import contextlib
import copy
import io
import logging
import math
import random
import re
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from scipy.stats import binom, chi2
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

FALSE_ALARM = 1e-9
"""The probability with which right noise, or sampling, is named, for each number that is judged."""


class Step(NamedTuple):
    """What a step released, and what it used."""

    gradients: dict[str, Tensor]
    """Of parameters, as the optimizer got them."""

    held: dict[str, Tensor]
    """Buffers and frozen parameters, after the step."""

    options: str
    """Of the optimizer, as learning rates."""

    drawn: list[int]
    """The samples that were loaded since the step before."""


class Run(NamedTuple):
    """A training as it was seen."""

    steps: list[Step]
    told: dict[str, Any]
    """What was printed, logged, warned of, raised, written and returned, by surface."""

    faults: list[str]
    """What no other run is needed to see."""


class WatchedSamples(torch.utils.data.Dataset):
    """Samples, which notes which were loaded."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples, self.drawn = samples, []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> Any:
        self.drawn.append(int(at))
        return self.samples[at]


class _Recorder:
    """Watches the steps of any optimizer of a model's parameters, and undoes them."""

    def __init__(self, model: nn.Module, samples: WatchedSamples) -> None:
        self.model, self.samples = model, samples
        self.steps: list[Step] = []
        self.faults: list[str] = []
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.before = [p.detach().clone() for p in self.names]
        self.expected = self.left = None
        self.options = ""

    def describe(self, optimizer: Optimizer) -> list[str]:
        """Write the weights, and the optimizer's state."""
        return _flat([list(self.names), list(optimizer.state.values())])

    def own(self, optimizer: Optimizer) -> list[nn.Parameter]:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in every if p in self.names]

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Note the gradients, and what the optimizer should make of them."""
        own = self.own(optimizer)
        if not own:
            return
        at = len(self.steps) + 1
        if self.left is not None and self.describe(optimizer) != self.left:
            self.faults.append(f"step {at}: weights or state changed before it")
        twins = {p: nn.Parameter(p.detach().clone()) for p in own}
        groups = [
            {**group, "params": [twins[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        for p, twin in twins.items():
            twin.grad = None if p.grad is None else p.grad.detach().clone()
        other = type(optimizer)(groups)
        other.state.update({twins[p]: copy.deepcopy(state) for p, state in optimizer.state.items()})
        other.step()
        self.expected = _flat([[*twins.values()], list(other.state.values())])
        self.options = str([{**group, "params": None} for group in optimizer.param_groups])

    @torch.no_grad()
    def end(self, optimizer: Optimizer, *_: Any) -> None:
        """Compare the step with what it should be, note what else changed, and undo it."""
        own = self.own(optimizer)
        if not own:
            return
        at = len(self.steps) + 1
        if _flat([own, list(optimizer.state.values())]) != self.expected:
            self.faults.append(f"step {at}: weights or state follow from more than gradients")
        held = {name: p for name, p in self.model.named_parameters() if p not in self.names}
        held |= dict(self.model.named_buffers())
        self.steps.append(
            Step(
                {
                    self.names[p]: own_part(torch.zeros_like(p) if p.grad is None else p.grad)
                    for p in own
                },
                {name: own_part(tensor) for name, tensor in held.items()},
                self.options,
                self.samples.drawn[:],
            )
        )
        self.samples.drawn.clear()
        for p, before in zip(self.names, self.before, strict=True):
            p.copy_(before)
        self.left = self.describe(optimizer)


def own_part(tensor: Tensor) -> Tensor:
    """Copy a tensor, or this rank's shard of it."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def _flat(value: Any) -> list[str]:
    """Write a structure's leaves, tensors with all their bits."""
    return [
        str(own_part(leaf).double().tolist()) if isinstance(leaf, Tensor) else str(leaf)
        for leaf in pytree.tree_leaves(value)
    ]


@contextlib.contextmanager
def _listening(told: dict[str, Any]) -> Iterator[None]:
    """Collect what is printed, logged and warned of."""
    out, err, lines = io.StringIO(), io.StringIO(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("transformers", "dpprof")]
    before = [(one.level, one.propagate) for one in loggers]
    for one in loggers:
        one.propagate = True
        one.setLevel(logging.INFO)  # which also clears what is cached
    logging.root.addHandler(handler)
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            yield
        finally:
            logging.root.removeHandler(handler)
            for one, (level, propagates) in zip(loggers, before, strict=True):
                one.propagate = propagates
                one.setLevel(level)
    errors = [line for line in re.split(r"[\r\n]", err.getvalue()) if "Writing model" not in line]
    told |= {"printed": (out.getvalue(), errors), "logged": lines}  # bars tell how fast files are
    told["warned"] = [str(one.message) for one in caught]


def read_file(path: Path) -> Any:
    """Read a file; of TensorBoard's all but the times."""
    if "tfevents" not in path.name:
        return path.read_bytes()
    from tensorboard.backend.event_processing import event_file_loader  # noqa: PLC0415

    events = list(event_file_loader.EventFileLoader(str(path)).Load())
    for one in events:
        one.wall_time = 0
    return [str(one) for one in events]


def record(
    make: Callable[[], nn.Module],
    train: Callable[[nn.Module, WatchedSamples], Any],
    samples: Sequence[Any],
    folder: Path,
) -> Run:
    """Train in an empty folder, and record what leaves it.

    Args:
        make: Makes the model.
        train: Trains it on samples, and returns what it would publish beside, by name.
        samples: The data.
        folder: Where to train; its ``out`` has the files that are published.
    """
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    random.seed(0)
    told: dict[str, Any] = {"raised": None}
    watched = WatchedSamples(samples)
    recorder = _Recorder(make(), watched)
    begin = register_optimizer_step_pre_hook(recorder.begin)
    end = register_optimizer_step_post_hook(recorder.end)
    name = mock.patch.object(uuid, "uuid4", return_value=uuid.UUID(int=1))
    with contextlib.chdir(folder), _listening(told), name:
        try:
            told |= train(recorder.model, watched) or {}
        except Exception as error:  # noqa: BLE001 (it leaves the training, too)
            told["raised"] = f"{type(error).__name__}: {error}"
        finally:
            begin.remove()
            end.remove()
        for path in sorted(Path("out").rglob("*")):
            if path.is_file():
                name = "out/board" if "tfevents" in path.name else str(path)
                told[name] = read_file(path)
    return Run(recorder.steps, told, recorder.faults)


def name_leaks(one: Run, other: Run, *, bound: float, divisor: float) -> list[str]:
    """Name what differs between trainings on neighbouring data, but for clipped sums.

    Args:
        one: On the data.
        other: With nothing in the place of a sample, with the same random numbers.
        bound: The bound C of a sample's gradient over all parameters.
        divisor: The public number that sums are divided by.
    """
    leaks = [*one.faults, *other.faults]
    if len(one.steps) != len(other.steps):
        leaks.append(f"{len(one.steps)} steps in place of {len(other.steps)}")
    for at, (own, others) in enumerate(zip(one.steps, other.steps, strict=False), start=1):
        parts = [own.gradients[name] - others.gradients[name] for name in own.gradients]
        moved = float(torch.cat([part.flatten().double() for part in parts]).norm()) / bound
        if not moved * divisor <= 1 + 1e-4:
            leaks.append(f"step {at}: the sum moved by {moved * divisor:.3g} C")
        held = own.held.keys() | others.held.keys()
        leaks += [
            f"step {at}: {name}"
            for name in sorted(held)
            if name not in own.held
            or name not in others.held
            or not torch.equal(own.held[name], others.held[name])
        ]
        if own.options != others.options:
            leaks.append(f"step {at}: options of the optimizer")
        if own.drawn != others.drawn:
            leaks.append(f"step {at}: which samples are drawn")
    names = one.told.keys() | other.told.keys()
    unknown = object()
    return leaks + [
        name
        for name in sorted(names)
        if _flat(one.told.get(name, unknown)) != _flat(other.told.get(name, unknown))
    ]


def _is_odd(squares: float, count: int) -> bool:
    """Tell whether so many squares of normal numbers do not add up to this."""
    return 2 * min(chi2.cdf(squares, count), chi2.sf(squares, count)) < FALSE_ALARM


def name_wrong_noise(one: Run, other: Run, std: float) -> list[str]:
    """Name parameters whose noise is missing, of another scale, or repeated.

    Args:
        one: A training.
        other: On the same data and draws, with other noise.
        std: What the standard deviation of a gradient's noise should be.
    """
    wrong, noises = [], {}
    for at, (own, others) in enumerate(zip(one.steps, other.steps, strict=True), start=1):
        for name, gradient in own.gradients.items():
            noise = (gradient - others.gradients[name]).flatten().double() / (math.sqrt(2) * std)
            place = f"step {at}: {name}"
            noises[place] = noise
            if not noise.any():
                wrong.append(f"{place} gets no noise")
    for name in one.steps[0].gradients:
        every = torch.cat([noise for place, noise in noises.items() if place.endswith(f": {name}")])
        if _is_odd(squares := float(every.square().sum()), len(every)):
            wrong.append(f"{name} gets {math.sqrt(squares / len(every)):.3g} times its noise")
    for (place, noise), (later, repeated) in combinations(noises.items(), 2):
        shared = min(len(noise), len(repeated))
        a, b = noise[:shared], repeated[:shared]
        if shared > 5 and float((a @ b).abs() / (a.norm() * b.norm() + 1e-30)) > 1 - 1e-6:
            wrong.append(f"{later} gets the noise of {place}")
    return wrong


def name_wrong_draws(run: Run, rate: float, samples: int) -> list[str]:
    """Name how the samples of steps are not drawn: each by itself, with the same probability."""
    drawn = torch.zeros(len(run.steps), samples)
    for at, step in enumerate(run.steps):
        drawn[at, step.drawn] = 1
    wrong = []
    for axis, what in ((1, "samples of a step"), (0, "steps of a sample")):
        counts, tries = drawn.sum(axis), drawn.shape[axis]
        spread = float((counts - tries * rate).square().sum() / (tries * rate * (1 - rate)))
        if _is_odd(spread, len(counts)):
            wrong.append(f"the number of {what} does not vary as Poisson sampling's")
    total, tries = int(drawn.sum()), drawn.numel()
    if 2 * min(binom.cdf(total, tries, rate), binom.sf(total - 1, tries, rate)) < FALSE_ALARM:
        wrong.append(f"{total / tries:.3g} of the samples are drawn")
    sets = [tuple(step.drawn) for step in run.steps if len(step.drawn) > 3]
    if len(set(sets)) < len(sets):
        wrong.append("steps repeat draws")
    return wrong
