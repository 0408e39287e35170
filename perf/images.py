"""Gradients of image classifiers: private by dpprof and by Opacus, beside plain, in one process.

A step is forward, backward and the clipped sum, float32, random images, on one thread; plain is
forward and backward. Sides take turns. Time is CPU time, which others on the machine change least.
Peaks are those of PyTorch's allocator in a step of each, beyond what is there before it; oneDNN's
own buffers are not in them.

    python perf/images.py --output perf/images.md
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.nn import functional

from dpprof.clipping import BookKeeping, FlashClipping
from dpprof.devices.cpu import CpuRecorder
from dpprof.models.build import build_model
from dpprof.spec.experiment import Experiment
from dpprof.system.console import say
from interleave import MIN_PAIRS, Comparison
from script import at_least, describe_place, make_parser, publish

MODELS: dict[str, tuple[int, ...]] = {
    "wrn-16-4": (32, 3, 32, 32),
    "resnet50-gn": (8, 3, 128, 128),
    "opacus-cnn": (64, 1, 28, 28),
}
"""Each model that comes with dpprof, and the shape of its batch."""

Step = Callable[[], object]


def make_plain(model: nn.Module, losses_of: Callable[[nn.Module], Tensor]) -> Step:
    """Return a step without clipping."""

    def step() -> None:
        losses_of(model).mean().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return step


def make_dpprof(way: type, model: nn.Module, losses_of: Callable[[nn.Module], Tensor]) -> Step:
    """Return a step of a ``Clipping``."""
    clipping = way(model, 1.0)

    def step() -> None:
        clipping.backward(losses_of(model))
        model.zero_grad()

    return step


def make_hooks(model: nn.Module, losses_of: Callable[[nn.Module], Tensor]) -> Step:
    """Return a step of Opacus's hooks."""
    module = GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), 0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
        loss_reduction="sum",
    )

    def step() -> None:
        losses_of(module).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.clip_and_accumulate()
        optimizer.zero_grad()

    return step


def make_ghost(model: nn.Module, losses_of: Callable[[nn.Module], Tensor]) -> Step:
    """Return a step of Opacus's ghost clipping."""
    module = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), 0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
        loss_reduction="sum",
    )

    def step() -> None:
        losses = losses_of(module)
        DPTensorFastGradientClipping(module, optimizer, losses, "sum").backward()
        optimizer.accumulate()
        optimizer.zero_grad()

    return step


SIDES: dict[str, Callable[[nn.Module, Callable[[nn.Module], Tensor]], Step]] = {
    "plain": make_plain,
    "flash-bk": partial(make_dpprof, BookKeeping),
    "flash": partial(make_dpprof, FlashClipping),
    "opacus-hooks": make_hooks,
    "opacus-ghost": make_ghost,
}


def make_sides(name: str) -> dict[str, Step]:
    """Return a step of each side, each on a model of its own."""
    shape = MODELS[name]
    experiment = Experiment.model_validate(
        {"model": name, "method": "standard", "batch_size": shape[0], "image_size": shape[-1]}
        | {"device": "cpu"}
    )
    torch.manual_seed(0)
    x, labels = torch.randn(shape), torch.randint(10, shape[:1])

    def losses_of(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(x), labels, reduction="none")

    return {
        side: build(build_model(experiment).train(), losses_of) for side, build in SIDES.items()
    }


def time_step(step: Step) -> float:
    """Return the seconds of CPU time that a step takes."""
    start = time.process_time()
    step()
    return time.process_time() - start


def find_peaks(sides: dict[str, Step]) -> dict[str, int]:
    """Return the peak of a step of each side, in bytes."""
    recorder = CpuRecorder()
    for name, step in sides.items():
        with recorder.window(name):
            step()
    peaks = recorder.close().peaks
    return {name: peaks[name].allocated_bytes or 0 for name in sides}


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", **at_least(MIN_PAIRS, MIN_PAIRS))
    parser.add_argument("--model", choices=MODELS, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| model | batch | method | CPU time / plain | 95 % interval | peak (MiB) | peak / plain |",
        "| --- | --- | --- | ---: | --- | ---: | ---: |",
    ]
    for model in arguments.model or MODELS:
        sides = make_sides(model)
        for step in sides.values():
            step()  # the first batch is verified
        peaks = find_peaks(sides)
        rounds = [
            {name: time_step(step) for name, step in sides.items()} for _ in range(arguments.rounds)
        ]
        for name in sides:
            times, plain = (tuple(one[side] for one in rounds) for side in (name, "plain"))
            found = Comparison(name, times, plain)
            low, high = found.interval
            lines.append(
                f"| {model} | {' x '.join(map(str, MODELS[model]))} | {name} "
                f"| {found.ratio:.2f} | {low:.2f} to {high:.2f} "
                f"| {peaks[name] / 2**20:.0f} | {peaks[name] / peaks['plain']:.2f} |"
            )
            say(lines[-1])
    place = describe_place("torch", "opacus", threads=1)
    publish(__doc__, "\n".join([place + ".", "", *lines]), arguments.output)


if __name__ == "__main__":
    main()
