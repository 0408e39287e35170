"""Gradients of classifiers: private by dpprof and by Opacus, beside plain, in one process.

A step is forward, backward and the clipped sum, float32, random images or tokens; plain is forward
and backward. Sides take turns. Time is CPU time, of all threads, which others on the machine change
least. Peaks are those of PyTorch's allocator in a step of each, beyond what is there before it;
oneDNN's own buffers are not in them.

Sizes are pixels or tokens; intervals are of 95 %. The claims, but for ``opacus-cnn``, whose steps
are Python for the most part: flash-bk is faster than every exact method of Opacus; it takes at most
1.35 times plain's time with convolutions, 1.15 times without; and at most 1.1 times plain's memory.

    python perf/classifiers.py --output perf/classifiers.md
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from dpprof.experiments.config.experiment import Experiment
from dpprof.measure.devices.cpu import CpuRecorder
from dpprof.private import BookKeeping, FlashClipping
from dpprof.private.layers.sample_losses import sample_losses
from dpprof.subjects.batches import make_batch
from dpprof.subjects.models.build import build_model
from dpprof.system.console import say
from interleave import MIN_PAIRS, Comparison, timed
from script import at_least, describe_place, end, lay_out, make_parser, publish

MODELS: dict[str, dict[str, Any]] = {
    "wrn-16-4": {"model": "wrn-16-4", "batch_size": 32},
    "resnet50-gn": {"model": "resnet50-gn", "batch_size": 8, "image_size": 128},
    "opacus-cnn": {"model": "opacus-cnn", "batch_size": 64},
    "bert-base": {
        "model": {"hf": "bert-base", "task": "sequence-classification"},
        "batch_size": 8,
        "seq_len": 128,
    },
    "vit-b16": {"model": "vit-b16", "batch_size": 4},
}
"""Each model and its batch."""

LIMITS = {"wrn-16-4": 1.35, "resnet50-gn": 1.35, "bert-base": 1.15, "vit-b16": 1.15}
"""The most that flash-bk's time may be of plain's."""

PEAK_LIMIT = 1.1

Step = Callable[[], object]
Losses = Callable[[nn.Module], Tensor]
"""Returns the losses of a model, of a batch that stays the same."""


def make_plain(model: nn.Module, losses_of: Losses) -> Step:
    """Return a step without clipping."""

    def step() -> None:
        losses_of(model).mean().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return step


def make_dpprof(way: type, model: nn.Module, losses_of: Losses) -> Step:
    """Return a step of a ``Clipping``."""
    clipping = way(model, 1.0)

    def step() -> None:
        clipping.backward(losses_of(model))
        model.zero_grad()

    return step


def make_opacus(way: type, module: nn.Module) -> Any:
    """Return an optimizer of Opacus's without noise."""
    sgd = torch.optim.SGD(module.parameters(), 0.1)
    sizes = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": 1}
    return way(sgd, **sizes, loss_reduction="sum")


def make_hooks(model: nn.Module, losses_of: Losses) -> Step:
    """Return a step of Opacus's hooks."""
    module = GradSampleModule(model, loss_reduction="sum")
    optimizer = make_opacus(DPOptimizer, module)

    def step() -> None:
        losses_of(module).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.clip_and_accumulate()
        optimizer.zero_grad()

    return step


def make_ghost(model: nn.Module, losses_of: Losses) -> Step:
    """Return a step of Opacus's ghost clipping."""
    module = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    optimizer = make_opacus(DPOptimizerFastGradientClipping, module)

    def step() -> None:
        losses = losses_of(module)
        DPTensorFastGradientClipping(module, optimizer, losses, "sum").backward()
        optimizer.accumulate()
        optimizer.zero_grad()

    return step


SIDES: dict[str, Callable[[nn.Module, Losses], Step]] = {
    "plain": make_plain,
    "flash-bk": partial(make_dpprof, BookKeeping),
    "flash": partial(make_dpprof, FlashClipping),
    "opacus-hooks": make_hooks,
    "opacus-ghost": make_ghost,
}


def make_sides(name: str) -> dict[str, Step]:
    """Return a step of each side, each on a model of its own."""
    experiment = Experiment.model_validate(
        {"method": "standard", "device": "cpu", "attention": "sdpa", **MODELS[name]}
    )
    torch.manual_seed(0)
    batch = make_batch(build_model(experiment), torch.device("cpu"), experiment)

    def losses_of(model: nn.Module) -> Tensor:
        return sample_losses(model(*batch.inputs), batch.labels)

    return {
        side: build(build_model(experiment).train(), losses_of) for side, build in SIDES.items()
    }


def find_peaks(sides: dict[str, Step]) -> dict[str, int]:
    """Return the peak of a step of each side, in bytes."""
    recorder = CpuRecorder()
    for name, step in sides.items():
        with recorder.window(name):
            step()
    peaks = recorder.close().peaks
    return {name: peaks[name].allocated_bytes or 0 for name in sides}


def compare(name: str, rounds: int) -> tuple[list[list[str]], list[str]]:
    """Compare the sides on a model; return the table's rows, and what misses a claim."""
    sides = make_sides(name)
    for step in sides.values():
        step()  # the first batch is verified
    peaks = find_peaks(sides)
    clocks = {side: timed(step, clock=time.process_time) for side, step in sides.items()}
    times = [{side: take_step() for side, take_step in clocks.items()} for _ in range(rounds)]
    rows, ratios = [], {}
    asked = MODELS[name]
    size = asked.get("image_size") or asked.get("seq_len") or "its own"
    for side in sides:
        pairs = Comparison(side, [(seconds[side], seconds["plain"]) for seconds in times])
        low, high = pairs.interval
        ratios[side] = pairs.ratio
        row = [name, str(asked["batch_size"]), str(size), side, f"{pairs.ratio:.2f}"]
        row += [f"{low:.2f} to {high:.2f}", f"{peaks[side] / 2**20:.0f}"]
        rows.append([*row, f"{peaks[side] / peaks['plain']:.2f}"])
        say(" | ".join(rows[-1]))
    if name not in LIMITS:
        return rows, []
    failures = []
    if ratios["flash-bk"] > LIMITS[name]:
        failures.append(f"{name}: {ratios['flash-bk']:.2f} times plain, not {LIMITS[name]}")
    if ratios["flash-bk"] >= min(ratios["opacus-hooks"], ratios["opacus-ghost"]):
        failures.append(f"{name}: no faster than Opacus")
    if (share := peaks["flash-bk"] / peaks["plain"]) > PEAK_LIMIT:
        failures.append(f"{name}: {share:.2f} times plain's memory, not {PEAK_LIMIT}")
    return rows, failures


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", **at_least(MIN_PAIRS, MIN_PAIRS))
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[list[str]] = []
    failures: list[str] = []
    for model in arguments.model or MODELS:
        compared, missed = compare(model, arguments.rounds)
        rows += compared
        failures += missed
    heads = ("model", "B:", "size:", "method", "CPU time / plain:", "interval", "peak (MiB):")
    lines = lay_out((*heads, "peak / plain:"), rows)
    lines += ["", *(f"* missed: {failure}" for failure in failures)] if failures else []
    place = describe_place("torch", "opacus", threads=arguments.threads)
    publish(__doc__, "\n".join([place + ".", "", *lines]), arguments.output)
    end("misses its claims", failures)


if __name__ == "__main__":
    main()
