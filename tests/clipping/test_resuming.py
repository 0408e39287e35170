"""A run that was stopped and resumed ends with the same bits as one that was not."""

import copy
import io
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from documents import PRIVATE_TRAINING, find_code
from one_call import Model, load, prepare, seeded, weights
from opacus.schedulers import ExponentialNoise
from products import one_in
from rank_pool import FORKS
from simulated_graphs import simulated_graphs
from small_models import FLAT, Secure, batch, build, take_step
from snapshots import assert_sentences
from torch.optim.lr_scheduler import ExponentialLR

from dpprof.private import BookKeeping, NoisyOptimizer, make_strategy
from dpprof.private.noise.strategies import NOISES

INNER = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


class Run:
    """A private training of a small model."""

    def __init__(self, way=BookKeeping, inner="sgd", **options) -> None:
        settings = {"noise_multiplier": 2.0, "expected_batch_size": 4} | options
        self.model = build()
        self.clipping = way(self.model, settings.pop("max_grad_norm", 0.5))
        wrapped = INNER[inner](self.model.parameters())
        self.optimizer = NoisyOptimizer(wrapped, self.clipping, **settings)

    def train(self, steps: int, parts: int = 1) -> "Run":
        for _ in range(steps):
            for at in range(parts):
                self.optimizer.signal_skip_step(at < parts - 1)
                take_step(self.optimizer, self.losses(at, parts))
        return self

    def losses(self, at: int = 0, parts: int = 1) -> torch.Tensor:
        ids, labels, weights = (part.chunk(parts)[at] for part in batch(4, 7))
        if at == 0:
            weights = weights.clone()
            weights[0] = torch.inf  # one of four is not finite
        return self.model.losses(ids, labels, weights)

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(exact=True),
        }

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(self.state(), file)
        return file

    def load(self, file: io.BytesIO) -> "Run":
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"], exact=True)
        return self


def same(one, other) -> bool:
    """Compare nested states to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(
    ("way", "inner", "is_seeded", "parts", "noise"),
    one_in(4, FLAT, INNER, [False, True], [1, 2], [None, *NOISES]),
)
def test_a_run_that_is_resumed_ends_as_one_that_was_not_stopped(
    way, inner, is_seeded, parts, noise
) -> None:
    strategy = noise and make_strategy(noise, steps=4, bands=3)

    def make(seed: int) -> Run:
        generator = torch.Generator().manual_seed(seed) if is_seeded else None
        return Run(way, inner, generator=generator, strategy=strategy)

    whole = make(5)
    first = whole.save()
    second = whole.train(2, parts).save()
    whole.train(2, parts)
    others = [make(6).load(first).train(4, parts), make(7).load(second).train(2, parts)]

    for other in others:
        assert same(other.state(), whole.state())
        assert other.optimizer.steps == 4
        assert other.clipping.batches == 4 * parts
        assert other.clipping.nonfinite_samples_total == 4


def test_what_schedules_changed_is_restored_and_goes_on() -> None:
    def make(**options) -> tuple[Run, ExponentialNoise]:
        run = Run(**options)
        return run, ExponentialNoise(run.optimizer, gamma=0.5)

    def train(run: Run, schedule: ExponentialNoise) -> None:
        for _ in range(2):
            run.train(1)
            schedule.step()
            run.clipping.max_grad_norm *= 3

    whole, schedule = make()
    train(whole, schedule)
    file, scheduled = whole.save(), dict(schedule.state_dict())
    train(whole, schedule)
    other, schedule = make()
    other.load(file)
    schedule.load_state_dict(scheduled)
    assert (other.optimizer.noise_multiplier, other.clipping.max_grad_norm) == (0.5, 4.5)
    train(other, schedule)

    assert (other.optimizer.noise_multiplier, other.clipping.max_grad_norm) == (0.125, 40.5)
    assert same(other.state(), whole.state())
    with pytest.raises(ValueError, match=r"noise_multiplier 2\.0, and this one with 0\.5;"):
        make(noise_multiplier=0.5)[0].load(file)  # as it is now, not as it began


def test_a_state_is_that_of_the_optimizer_inside_with_privacy_added() -> None:
    run = Run(inner="adamw").train(1)
    state = run.optimizer.state_dict(exact=True)
    inner = run.optimizer.original_optimizer.state_dict()
    assert state.keys() == {*inner, "privacy"}
    assert same({key: state[key] for key in inner}, inner)
    assert run.optimizer.state is run.optimizer.original_optimizer.state


def test_a_state_in_the_optimizer_inside_leaves_noise_fresh() -> None:
    first = Run().train(1)
    state = first.optimizer.state_dict(exact=True)
    first.train(1)
    for _ in range(2):
        other = Run()
        other.optimizer.original_optimizer.load_state_dict(state)
        assert same(other.optimizer.original_optimizer.state_dict()["state"], state["state"])
        assert not same(other.optimizer.state_dict(exact=True)["privacy"], state["privacy"])
        assert not same(other.train(1).state(), first.state())


def refuse(run: Run, state, told: str = "", error=ValueError) -> str:
    """Load a state, which is refused and changes nothing; returns what is said."""
    before = run.save()
    with pytest.raises(error, match=told) as refused:
        run.optimizer.load_state_dict(state, exact=True)
    before.seek(0)
    assert same(run.state(), torch.load(before))
    return str(refused.value)


def test_a_state_of_other_settings_is_refused() -> None:
    state = Run().train(1).optimizer.state_dict(exact=True)
    assert_sentences("clipping/states", lambda other: refuse(Run(**other).train(2), state))


REFUSED = {
    "without privacy": (lambda s: s.pop("privacy"), r"load it into optimizer\.original_optimizer"),
    "another rank": (
        lambda s: s["privacy"]["made_with"].update(rank=2),
        "made with rank 2, and this one with 0;",
    ),
    "another number of ranks": (
        lambda s: s["privacy"]["made_with"].update({"number of ranks": 2}),
        "made with number of ranks 2, and this one with 1;",
    ),
    "elements spread otherwise over ranks": (
        lambda s: s["privacy"]["made_with"].update({"sums reduced together": "[8, 2]"}),
        r"made with sums reduced together '\[8, 2\]', and this one with '';",
    ),
    "no secrets": (lambda s: s["privacy"].pop("secrets"), "has no secrets, so its noise"),
    "a generator's noise": (
        lambda s: s["privacy"]["secrets"].update(noise={"cuda": torch.zeros(16)}),
        "follows from: cuda, and here from: secret, nonce; leave out exact=True",
    ),
    "other groups of parameters": (
        lambda s: s.update(param_groups=s["param_groups"] * 2),
        "different number of parameter groups",
    ),
    "no such bound": (
        lambda s: s["privacy"]["settings"].update(max_grad_norm=float("nan")),
        "max_grad_norm must be positive and finite",
    ),
    "no counts": (lambda s: s["privacy"]["secrets"].pop("batches"), "batches"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(what) -> None:
    run = Run().train(1)
    run.optimizer.noise_multiplier = 0.75
    state = run.optimizer.state_dict(exact=True)
    change, message = REFUSED[what]
    change(state)
    refuse(Run(), state, message, KeyError if what == "no counts" else ValueError)


def test_fresh_noise_follows_from_no_rank() -> None:
    state = Run().train(1).optimizer.state_dict()
    state["privacy"]["made_with"] |= {"rank": 1, "number of ranks": 2}
    run = Run()
    run.optimizer.load_state_dict(state)
    assert run.train(1).optimizer.steps == 2


def test_a_generator_seeded_alike_repeats_no_noise_once_a_state_is_loaded() -> None:
    """What both runs released would show the difference of their sums."""
    state = Run(generator=seeded(3)).train(1).optimizer.state_dict()
    ended = []
    for _ in range(2):
        run = Run(generator=seeded(3))
        run.optimizer.load_state_dict(state)
        assert run.optimizer.generator is None
        ended.append(weights(run.train(1).model))
    assert not torch.equal(*ended)


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_generator_without_a_state_goes_on_with_fresh_noise_alone(is_secure) -> None:
    run = Run(generator=Secure(), secure_mode=is_secure).train(1)
    state = run.optimizer.state_dict(exact=True)
    with pytest.raises(ValueError, match="has no secrets, so its noise cannot be repeated"):
        run.optimizer.load_state_dict(state, exact=True)
    run.optimizer.load_state_dict(state)
    assert run.train(1).optimizer.steps == 2


def test_a_generator_takes_the_states_of_its_kind_alone() -> None:
    state = Run(generator=torch.Generator()).optimizer.state_dict(exact=True)
    state["privacy"]["secrets"]["noise"]["cpu"] = torch.zeros(16, dtype=torch.uint8)
    refuse(Run(generator=torch.Generator()), state, "does not take this state .*size")


def test_secure_noise_is_the_systems_or_of_a_secure_generator() -> None:
    with pytest.raises(ValueError, match="PyTorch's own are not; leave out the generator"):
        Run(generator=torch.Generator(), secure_mode=True)
    run = Run(secure_mode=True).train(1)
    assert run.optimizer.state_dict(exact=True)["privacy"]["secrets"]["noise"] == {}


def left_after_backward(run: Run) -> None:
    run.clipping.backward(run.losses())


def left_after_a_part(run: Run) -> None:
    run.optimizer.signal_skip_step()
    take_step(run.optimizer, run.losses(0, 2))


def left_before_it_was_applied(run: Run) -> None:
    run.clipping.backward(run.losses())
    run.optimizer.accumulate()
    run.optimizer.add_noise()


@pytest.mark.parametrize(
    "leave",
    [
        left_after_backward,
        left_after_a_part,
        lambda run: run.optimizer.signal_skip_step(),  # before a part
        left_before_it_was_applied,
    ],
)
def test_within_a_batch_a_state_is_neither_saved_nor_loaded(leave) -> None:
    run = Run().train(1)
    state = run.optimizer.state_dict(exact=True)
    leave(run)
    with pytest.raises(RuntimeError, match="cannot be saved within a batch: sums without noise"):
        run.optimizer.state_dict(exact=True)
    with pytest.raises(RuntimeError, match="cannot be loaded within a batch"):
        run.optimizer.load_state_dict(state)


def test_a_batch_that_was_dropped_may_be_followed_by_a_state() -> None:
    run = Run().train(1)
    left_after_backward(run)
    run.optimizer.zero_grad()
    assert run.optimizer.state_dict(exact=True)["privacy"]["steps"] == 1


USERS = {"unit": "user", "users": [at % 9 for at in range(24)], "samples_of_user": 2}
CORRELATED = {"bands": 2, "folds": 2, "steps": 8}
TRAININGS = {
    "in parts": lambda _: {"max_batch_size": 4},
    "in folds, truncated": lambda _: {"folds": 3, "truncated_batch_size": 4},
    "of users": lambda _: USERS | {"data_loader": load(batch_size=4)},
    "of users, banded": lambda _: (
        USERS | CORRELATED | {"data_loader": load(batch_size=4), "noise": "banded"}
    ),
    "bisr": lambda _: CORRELATED | {"noise": "bisr"},
    "a quantile": lambda _: {"bound_quantile": 0.5, "noise_multiplier": 0.5},
    "a corrected second moment": lambda model: {
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "second_moment_floor": 1e-3,
    },
    "joined optimizers": lambda model: {
        "optimizer": [
            torch.optim.SGD([model.layers[0].weight, model.layers[2].weight], lr=0.1),
            torch.optim.Adam([model.layers[0].bias, model.layers[2].bias], lr=0.1),
        ]
    },
    "replayed": lambda _: {"max_batch_size": 2},
    # The first batch after a state may have one sample, which shows no mixing.
    "replayed, small batches": lambda _: {"data_loader": load(batch_size=2)},
    "replayed, noise by a secret": lambda model: {
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
        "max_batch_size": 2,
        "verify_every": 2,
        "noise_generator": None,
    },
}

STOPS = {
    "replayed, small batches": (24, (2, 3, 5, 8)),
    "replayed, noise by a secret": (8, (1, 5)),
}
"""How many steps there are, and after how many a run stops; else 8, and in the second epoch."""


@pytest.mark.parametrize("kind", TRAININGS)
def test_every_private_training_goes_on_to_the_same_bits(kind, monkeypatch) -> None:
    def make(**others):
        model = Model().double()
        private = prepare(model, **TRAININGS[kind](model) | others)
        return model, private, ExponentialLR(private.optimizer, 0.9)

    def go_on(model, private, schedule, until: int) -> None:
        while private.optimizer.steps < until:
            for part in private.data_loader:
                take_step(private.optimizer, model.losses, *part)
                schedule.step()
                if private.data_loader.is_last_part and private.optimizer.steps == until:
                    break

    with simulated_graphs(monkeypatch) if "replayed" in kind else nullcontext():
        whole = make()
        states = {0: copy.deepcopy(whole[1].state_dict(exact=True))}
        steps, stops = STOPS.get(kind, (8, (5,)))
        go_on(*whole, steps)
        for stop in stops:
            stopped = make()
            stopped[1].load_state_dict(states[0], exact=True)
            go_on(*stopped, stop)
            saved = copy.deepcopy((stopped[1].state_dict(exact=True), stopped[2].state_dict()))
            seeds = {"sampling_generator": seeded(8)}
            if "secret" not in kind:
                seeds["noise_generator"] = seeded(9)
            model, private, schedule = make(**seeds)
            private.load_state_dict(saved[0], exact=True)
            schedule.load_state_dict(saved[1])
            go_on(model, private, schedule, steps)

            assert torch.equal(weights(model), weights(whole[0]))
            assert private.spent.history == whole[1].spent.history
            assert private.optimizer.max_grad_norm == whole[1].optimizer.max_grad_norm


# The loop of the document, in processes that are killed.

SETUP = '''
import os
import random
import secrets
import signal

import torch
from torch.utils.data import TensorDataset

os.chdir(folder)


class Seeded(torch.Generator):
    """Seeds that can be compared, in place of the operating system's; others in each attempt."""

    made = 0

    def seed(self):
        Seeded.made += 1
        self.manual_seed(1000 * attempt + Seeded.made)


torch.Generator = Seeded
numbers = random.Random(attempt)
secrets.token_bytes = numbers.randbytes
torch.set_num_threads(1)
torch.manual_seed(attempt)
from dpprof.private import Clipping

backward, replace = Clipping.backward, os.replace
calls = 0


def die(where):
    global calls
    calls += where == moment
    if where == moment and calls >= number:
        os.kill(os.getpid(), signal.SIGKILL)


def dying_backward(clipping, losses):
    backward(clipping, losses)
    die("in a part" if clipping.continues() else "in a step")


def dying_replace(*paths):
    die("in writing")
    replace(*paths)


Clipping.backward, os.replace = dying_backward, dying_replace
model = torch.nn.Sequential(
    torch.nn.Embedding(16, 8), torch.nn.Dropout(0.2), torch.nn.LayerNorm(8), torch.nn.Linear(8, 16)
)
data = torch.randint(16, (2, 60, 5), generator=torch.Generator().manual_seed(1))
dataset, sample_rate, total_steps = TensorDataset(*data), 0.1, 24
'''

END = """
states = [model.state_dict(), optimizer.state_dict(exact=True), accountant.state_dict()]
torch.save([*states, sampling.get_state(), torch.get_rng_state()], "final.pt")
"""


def run_script(
    folder: Path, code: str, attempt: int, moment: str = "never", number: int = 0
) -> int:
    """Run a script in a process of its own, until it ends or kills itself; returns its status."""
    names = {"folder": folder, "attempt": attempt, "moment": moment, "number": number}
    process = FORKS.Process(target=exec, args=(code, names))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize(
    ("physical_batch", "kills"),
    [
        (2, [("in a part", 24), ("in writing", 1)]),
        pytest.param(16, [("in a step", 17)], marks=pytest.mark.slow),
    ],
)
def test_the_loop_in_the_documents_ends_with_the_same_bits_however_often_it_is_killed(
    tmp_path, physical_batch, kills
) -> None:
    loop = find_code(PRIVATE_TRAINING, "os.replace")
    assert "split(16)" in loop
    code = SETUP + loop.replace("split(16)", f"split({physical_batch})") + END
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()

    assert run_script(whole, code, 0) == 0
    for attempt, (moment, number) in enumerate(kills):
        assert run_script(killed, code, attempt, moment, number) == -signal.SIGKILL
        assert (killed / "training.pt").exists()
        assert not (killed / "final.pt").exists()
    assert run_script(killed, code, len(kills)) == 0

    expected, found = (torch.load(folder / "final.pt") for folder in (whole, killed))
    assert same(found, expected)
    assert found[2]["history"] == [(1.0, 0.1, 24)]
    batches = found[1]["privacy"]["secrets"]["batches"]
    assert batches == 24 if physical_batch == 16 else batches > 2 * 24
