"""Nothing but noisy sums leaves private loops, and the recorder names what leaves broken ones."""

import logging
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from one_call import seeded
from released_loops import (
    BATCH,
    BOUND,
    CANARY,
    NOISE,
    RATE,
    SAMPLES,
    STEPS,
    D,
    build,
    draw,
    losses_of,
    record_rank,
    train,
)
from releases import Run, name_leaks, name_wrong_draws, name_wrong_noise, record
from simulated_graphs import SimulatedGraphs, simulated_graphs
from torch.optim import SGD
from torch.utils.data import default_collate


class Broken:
    """A loop by hand that breaks the guarantee in one way, or in none."""

    def __init__(self, way: str, seed: int) -> None:
        self.way, self.noise, self.sampling = way, seeded(seed), seeded(2)
        self.order, self.last = [], None

    def draw(self) -> list[int]:
        if self.way != "shuffled":
            return (torch.rand(SAMPLES, generator=self.sampling) < RATE).nonzero()[:, 0].tolist()
        self.order = self.order or torch.randperm(SAMPLES, generator=self.sampling).tolist()
        drawn, self.order = self.order[:BATCH], self.order[BATCH:]
        return drawn

    def clip(self, losses, parameters):
        """Sum gradients, each clipped over all parameters, or by the batch, or by parameter."""
        gradients = [torch.autograd.grad(one, parameters, retain_graph=True) for one in losses]
        norms = [torch.cat([part.flatten() for part in one]).norm() for one in gradients]
        bound = 2 * torch.stack(norms).median() if self.way == "bound of the batch" else BOUND
        sums = [torch.zeros_like(p) for p in parameters]
        for one, norm in zip(gradients, norms, strict=True):
            for total, part in zip(sums, one, strict=True):
                own = part.norm() if self.way == "bound by layer" else norm
                total.add_(part * min(1, bound / (own + 1e-6)))
        return sums

    def draw_noise(self, sums):
        if self.way == "last noise again" and self.last is not None:
            noise, self.last = self.last, None
            return noise
        self.last = []
        state = self.noise.get_state()
        for total in sums:
            if self.way == "repeated generator":
                self.noise.set_state(state)
            scale = 0 if self.way == "layer without noise" and total.shape == (12, D) else 1
            scale = 0.75 if self.way == "less noise" and total.shape == (12, D) else scale
            noise = torch.randn(total.shape, generator=self.noise, dtype=total.dtype)
            self.last.append(scale * NOISE * BOUND * noise)
        return self.last

    def tell(self, losses):
        if self.way == "log":
            logging.getLogger("dpprof").info("loss %.3f", losses.mean())
        if self.way == "print":
            print(float(losses.mean()))
        if self.way == "error" and losses.max() > 1000:
            raise ValueError(f"sample {losses.argmax()} has a loss of {losses.max()}")
        if self.way == "file":
            with Path("out/loss.txt").open("a") as file:
                file.write(f"{losses.mean()}\n")

    def train(self, model, samples):
        parameters = list(model.parameters())
        sgd = SGD(parameters, lr=0.1)
        Path("out").mkdir()
        for _ in range(STEPS):
            x, y, is_there = default_collate([samples[at] for at in self.draw()])
            losses = losses_of(model, x, y, is_there)
            sums = self.clip(losses, parameters)
            noise = self.draw_noise(sums)
            divisor = is_there.sum() if self.way == "divisor" else BATCH
            if self.way == "rate":
                sgd.param_groups[0]["lr"] = 0.1 / (1 + float(losses.mean()))
            self.tell(losses)
            for p, total, own in zip(parameters, sums, noise, strict=True):
                p.grad = (total if self.way == "noise too late" else total + own) / divisor
            if self.way == "state":
                sgd.state[parameters[0]]["sum"] = sums[0]
            sgd.step()
            if self.way == "noise too late":
                torch.save(model.state_dict(), "out/model.pt")
                with torch.no_grad():
                    for p, own in zip(parameters, noise, strict=True):
                        p.sub_(0.1 * own / divisor)


def train_by_hand(model, samples, *, seed=3, way=""):
    Broken(way, seed).train(model, samples)


def judge(train, folder, make=build) -> tuple[list[str], Run]:
    """Record neighbours, and other noise; returns what is named, and the first run."""
    run, other = (record(make, partial(train, seed=n), draw(), folder / str(n)) for n in (3, 4))
    neighbour = record(make, train, draw(has_canary=False), folder / "neighbour")
    named = compare(run, neighbour)
    named += name_wrong_noise(run, other, NOISE * BOUND / BATCH)
    return named + name_wrong_draws(run, RATE, SAMPLES), run


def compare(run: Run, neighbour: Run) -> list[str]:
    """Name leaks of neighbours; where there are none, steps move by the canary alone."""
    named = name_leaks(run, neighbour, bound=BOUND, divisor=BATCH)
    if not named:
        assert run.told.get("raised") is None, run.told["raised"]
        assert len(run.steps) == STEPS
        for own, others in zip(run.steps, neighbour.steps, strict=True):
            pairs = [(own.gradients[name], others.gradients[name]) for name in own.gradients]
            assert any(not torch.equal(*pair) for pair in pairs) == (CANARY in own.drawn)
    return named


WAYS = {
    "layer without noise": r"step 1: 0\.weight gets no noise",
    "less noise": r"^0\.weight gets 0\.[78]\d* times its noise",
    "last noise again": r"step 2: 0\.weight gets the noise of step 1: 0\.weight",
    "repeated generator": r"step 1: 3\.bias gets the noise of step 1: 0\.bias",
    "bound by layer": r"the sum moved by 2 C",
    "bound of the batch": r"the sum moved by \d+(\.\d+)? C",
    "divisor": r"the sum moved by [\d.]+ C",
    "statistics": r"step \d+: 1\.running_mean",
    "shuffled": "the number of samples of a step does not vary as Poisson sampling's",
    "noise too late": r"step 1: 0\.weight gets no noise",
    "log": "logged",
    "print": "printed",
    "error": "raised",
    "state": r"step 2: weights or state changed before it",
    "file": r"out/loss\.txt",
    "rate": r"step \d+: options of the optimizer",
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_broken_loop_releases_is_named(way, tmp_path) -> None:
    make = partial(build, has_statistics=way == "statistics")
    named, _ = judge(partial(train_by_hand, way=way), tmp_path, make)
    assert [one for one in named if re.search(WAYS[way], one)], named


def test_a_right_loop_by_hand_releases_noisy_sums_alone(tmp_path) -> None:
    assert judge(train_by_hand, tmp_path)[0] == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "flash"},
        {"max_batch_size": 2},
        {"resumes_after": 5},
        {"clipping": "normalised"},
    ],
    ids=str,
)
def test_make_private_releases_noisy_sums_alone(options, tmp_path) -> None:
    named, run = judge(partial(train, **options), tmp_path)
    assert named == []
    assert {"out/state.pt", "guarantee"} <= run.told.keys()


def test_a_captured_loop_releases_noisy_sums_alone(tmp_path, monkeypatch) -> None:
    with simulated_graphs(monkeypatch):
        named, _ = judge(partial(train, max_batch_size=4), tmp_path)
        assert SimulatedGraphs.captured >= 3
    assert named == []


def join(ranks: list[Run], *, shards: bool) -> Run:
    """Join what ranks drew, and the shards of gradients that each has."""
    steps = []
    for both in zip(*(rank.steps for rank in ranks), strict=True):
        gradients = {
            f"{name} of rank {at}": part
            for at, step in enumerate(both if shards else both[:1])
            for name, part in step.gradients.items()
        }
        drawn = [sample for step in both for sample in step.drawn]
        steps.append(both[0]._replace(gradients=gradients, drawn=drawn))
    told = {
        f"{name} of rank {at}": one.told[name] for at, one in enumerate(ranks) for name in one.told
    }
    return Run(steps, told, [fault for one in ranks for fault in one.faults])


@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp"])
def test_two_ranks_release_noisy_sums_alone(shards, tmp_path, pools) -> None:
    """Their noise is bound to the sums, so that neighbours are compared without noise."""

    def run(name, *, has_canary=True, seed=3, noise=NOISE):
        given = {"has_canary": has_canary, "seed": seed, "noise": noise, "shards": shards}
        return join(pools[2].compute(record_rank, tmp_path / name, **given), shards=shards)

    silent, neighbour = run("silent", noise=0.0), run("neighbour", has_canary=False, noise=0.0)
    ranks, other = run("noise"), run("other", seed=4)
    for one in (silent, ranks):
        assert [one.told[f"raised of rank {at}"] for at in range(2)] == [None, None]
        assert len(one.steps) == STEPS
    assert compare(silent, neighbour) == []
    assert name_wrong_noise(ranks, other, NOISE * BOUND / BATCH) == []
    assert name_wrong_draws(ranks, RATE, SAMPLES) == []
