"""Train one cell of the sweep of trainings that learn, with every seed, and leave one JSON file.

dpprof's ``make_private`` (``flash-bk``) and Opacus's (``hooks``) get the same noise multiplier, the
same rate of Poisson sampling and the same number of steps.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import make_private
from dpprof.private.accounting.budget import find_noise
from dpprof.private.accounting.schedule import Sampling
from dpprof.system.files import write_atomically
from learning_plan import BANDS, Cell, CellResult, Run
from learning_tasks import (
    METRICS,
    build_model,
    load_data,
    losses_of,
    make_optimizer,
    measure,
    pretrain,
)
from script import describe_place

UNREACHED = 1e9
"""A bound that no gradient reaches, where there is no privacy."""

Step = Callable[..., None]


def find_multiplier(cell: Cell, samples: int) -> float:
    """Find the least noise with which all steps keep the cell's epsilon; 0 without privacy."""
    if cell.epsilon is None:
        return 0.0
    settings = cell.settings
    folds = BANDS if settings.noise == "banded" else 1
    sampling = Sampling(folds * settings.batch_size / samples, folds)
    return find_noise(cell.epsilon, settings.delta, settings.steps, sampling, "prv")


def prepare(
    cell: Cell, model: nn.Module, data: TensorDataset, noise: float, seed: int
) -> tuple[Step, Iterator[Any]]:
    """Return what takes a step on a batch, and the batches, by the cell's library."""
    settings = cell.settings
    optimizer = make_optimizer(cell.task, model, settings.learning_rate)
    sampling, drawn = (torch.Generator().manual_seed(2 * seed + at) for at in (0, 1))
    loader = DataLoader(data, settings.batch_size, shuffle=True, generator=sampling)
    options: dict[str, Any] = {
        "noise_multiplier": noise,
        "max_grad_norm": UNREACHED if cell.epsilon is None else settings.max_grad_norm,
        "noise_generator": drawn,
    }
    if settings.noise == "banded":
        bands = {"bands": BANDS, "folds": BANDS}
        options |= {"noise": "banded", "steps": settings.steps, **bands}
    makers: dict[str, Callable[..., Iterable[Any]]] = {
        "dpprof": partial(make_private, check=False, sampling_generator=sampling, **options),
        "opacus": partial(_make_private_by_opacus, **options),
        "torch": lambda *_: (model, optimizer, _draw(data, settings.batch_size, sampling)),
    }
    trained, stepping, batches = makers[cell.library](model, optimizer, loader)

    def step(inputs: Tensor, labels: Tensor) -> None:
        losses = losses_of(trained, inputs, labels)
        if cell.library == "dpprof":
            stepping.backward(losses)
        else:
            # Opacus multiplies by the batch's own size, and divides by the mean one.
            size = len(losses) if cell.library == "opacus" else settings.batch_size
            (losses.sum() / size).backward()  # type: ignore[no-untyped-call]
        stepping.step()
        stepping.zero_grad()

    return step, chain.from_iterable(repeat(batches))


def _make_private_by_opacus(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], **options: Any
) -> tuple[Any, Any, Any]:
    made: tuple[Any, Any, Any] = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, **options
    )
    return made


def _draw(data: TensorDataset, batch_size: int, generator: torch.Generator) -> Iterator[Any]:
    while True:
        yield data[torch.rand(len(data), generator=generator) < batch_size / len(data)]


def train(cell: Cell, pretrained: Path | None) -> CellResult:
    """Train a cell with every seed."""
    data = load_data(cell.task)
    noise = find_multiplier(cell, len(data.train))
    runs = []
    for seed in range(cell.seeds):
        torch.manual_seed(seed)
        model = build_model(cell.task, cell.settings, pretrained)
        before = measure(cell.task, model, data.held_out)
        step, batches = prepare(cell, model, data.train, noise, seed)
        began = time.process_time()
        for batch in islice(batches, cell.settings.steps):
            step(*batch)
        cpu_s = time.process_time() - began
        held_out = measure(cell.task, model, data.held_out)
        runs.append(Run(seed=seed, before=before, held_out=held_out, cpu_s=cpu_s))
    return CellResult(
        cell=cell,
        metric=METRICS[cell.task],
        samples=len(data.train),
        sample_rate=cell.settings.batch_size / len(data.train),
        noise_multiplier=noise,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        runs=runs,
        place=describe_place("torch", "opacus", threads=1),
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cell", type=Path, help="a cell of the plan, as JSON; else pretrain")
    parser.add_argument("--pretrained", type=Path, help="the weights that adapters begin with")
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.cell is None:
        torch.save(pretrain(), arguments.output)
        return
    result = train(Cell.model_validate_json(arguments.cell.read_bytes()), arguments.pretrained)
    write_atomically(arguments.output, result.model_dump_json(indent=1) + "\n")


if __name__ == "__main__":
    main()
