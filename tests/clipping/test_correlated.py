"""Correlated noise has the covariance of its strategy, and nobody can subtract it."""

import copy
import math
import re

import numpy as np
import one_call
import pytest
import torch
from documents import CORRELATED, find_code
from fresh_process import ROOT
from one_call import Model, train, weights
from products import one_in
from simulated_graphs import simulated_graphs
from small_models import private, squares, take_step
from strategy_matrices import matrix
from torch import nn

from dpprof.private import (
    BookKeeping,
    CapturedStep,
    FlashClipping,
    NoisyOptimizer,
    PrivateTraining,
    check,
    find_errors,
    make_strategy,
)
from dpprof.private.accounting.budget import find_noise
from dpprof.private.accounting.schedule import Sampling
from dpprof.private.noise.buffers import PLACES, NoiseBuffers
from dpprof.private.noise.noise import NoiseOfStep
from dpprof.private.noise.strategies import NOISES

STEPS, BANDS, SIGMA, BOUND, SIZE = 7, 3, 2.0, 0.5, 4
STD = SIGMA * BOUND / SIZE
INNER = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


class Run:
    """A training of a matrix of many numbers, and what was released of those without gradients."""

    def __init__(self, noise="banded", inner="sgd", dtype=torch.float32, d=340, **options) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(d, d, bias=False), nn.Linear(d, 1)).to(dtype)
        self.d, self.dtype = d, dtype
        self.clipping = BookKeeping(self.model, BOUND, first_batch="trusted")
        options.setdefault("strategy", make_strategy(noise, steps=STEPS, bands=BANDS))
        self.optimizer = NoisyOptimizer(
            INNER[inner](self.model.parameters()),
            self.clipping,
            **{"noise_multiplier": SIGMA, "expected_batch_size": SIZE} | options,
        )
        self.released: list[torch.Tensor] = []

    def losses(self, samples: int) -> torch.Tensor:
        """Return losses of samples that are zero but for their first three numbers."""
        x = torch.zeros(samples, self.d, dtype=self.dtype)
        x[:, :3] = torch.arange(3 * samples).view(samples, 3).cos()
        return squares(self.model, x) if samples else torch.zeros(0)

    def step(self, samples: int = 0) -> torch.Tensor:
        """Step on a batch, and return what was released where the samples' gradients are zero."""
        self.clipping.backward(self.losses(samples))
        self.optimizer.step()
        self.released.append(self.model[0].weight.grad[:, 3:].flatten().double())
        self.optimizer.zero_grad()
        return self.released[-1]

    def state(self):
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict(exact=True)])

    def load(self, state, *, exact: bool) -> "Run":
        model, optimizer = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer, exact=exact)
        return self


def assert_covariance(rows, expected) -> None:
    """Compare the covariance of rows of independent numbers, by six standard errors."""
    rows = torch.stack(list(rows)).numpy()
    n = rows.shape[1]
    errors = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / n)
    assert np.abs(rows @ rows.T / n - expected).max() <= 6 * errors.max()
    assert (np.abs(rows @ rows.T / n - expected) <= 6 * errors + 1e-12).all()
    assert np.abs(rows.mean(1)).max() <= 6 * math.sqrt(np.diag(expected).max() / n)


def covariance(strategy, steps: int = STEPS):
    """Return the covariance over steps that a strategy has."""
    inverse = np.linalg.inv(matrix(strategy))
    return (STD**2 * inverse @ inverse.T)[:steps, :steps]


@pytest.mark.parametrize(
    ("noise", "bands", "inner", "dtype", "place"),
    one_in(6, NOISES, [1, 2, 4, 7], INNER, [torch.float32, torch.float64, torch.bfloat16], PLACES),
)
def test_the_covariance_over_steps_is_that_of_the_strategy(
    noise, bands, inner, dtype, place
) -> None:
    strategy = make_strategy(noise, steps=STEPS, bands=bands, folds=7)
    run = Run(inner=inner, dtype=dtype, strategy=strategy, noise_buffers=place)
    for _ in range(STEPS):
        run.step()

    assert len(run.released[0]) > 100_000
    total = sum(p.numel() for p in run.model.parameters())
    assert_covariance(run.released, covariance(strategy))
    kept = run.optimizer.buffers.kept
    assert sum(each.numel() for each in kept) == (bands - 1) * total
    size = sum(each.nbytes for each in kept) if place == "device" else 0
    assert run.optimizer.buffers.count_bytes(run.clipping.parameters) == size
    at_least = torch.promote_types(dtype, torch.float32)
    assert all(each.dtype == at_least for each in kept)


@pytest.mark.parametrize("noise", NOISES)
def test_many_elements_and_complex_ones_have_it_too(noise, monkeypatch) -> None:
    monkeypatch.setattr("dpprof.private.noise.noise.DRAWN_IN_TURN", 2**14)  # in several threads
    strategy = make_strategy(noise, steps=STEPS, bands=BANDS)
    buffers, rows = NoiseBuffers(strategy), []
    keys = Run(d=2).optimizer.keys
    for step in range(STEPS):
        sums = [torch.zeros(50_000), torch.zeros(30_000, dtype=torch.complex64)]
        keys.begin(step, sums, 1.0)
        buffers.begin(keys.nonce)
        key = keys.bind(sums, after=buffers.key)
        adding = NoiseOfStep(STD * strategy.scale, 1.0, key, buffers)
        for each in sums:
            adding.add_to(each)
        buffers.end(key.key)
        rows.append(torch.cat([sums[0], torch.view_as_real(sums[1]).flatten()]).double())
    assert_covariance(rows, covariance(strategy))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("way", [BookKeeping, FlashClipping])
def test_no_sample_moves_what_is_seen_by_more_than_the_bound(noise, way) -> None:
    """Train on all neighbouring data, as a sampler of folds draws, and see what ``C G`` is."""
    steps, bands, samples = 9, 3, 6
    strategy = make_strategy(noise, steps=steps, bands=bands, folds=bands)
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[0] *= 100  # some are clipped, and some are not
    x[5] /= 100

    def sums(without: int | None, drawn) -> np.ndarray:
        """Return the sums of all steps; rate 0, so that all depend on the samples alone."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        clipping = way(model, BOUND, first_batch="trusted")
        optimizer = private(clipping, model, lr=0.0, strategy=strategy)
        rows = []
        for step in range(steps):
            # Fold by fold; of a fold each sample by chance.
            batch = [i for i in range(step % bands, samples, bands) if i in drawn[step]]
            own = x[[i for i in batch if i != without]]
            clipping.backward(squares(model, own) if len(own) else torch.zeros(0))
            optimizer.step()
            rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            optimizer.zero_grad()
        return torch.stack(rows).numpy()

    seen, largest = matrix(strategy), 0.0
    chance = torch.Generator().manual_seed(2)
    often = [set(range(samples)) for _ in range(steps)]
    seldom = [{i for i in range(samples) if torch.rand((), generator=chance) < 0.5} for _ in often]
    for drawn in (often, seldom):
        every = sums(None, drawn)
        for without in range(samples):
            moved = every - sums(without, drawn)
            taken = np.flatnonzero(np.linalg.norm(moved, axis=1) > 0)
            parts = [taken] if noise == "bisr" else [[step] for step in taken]
            for part in parts:  # each participation is a mechanism of its own with ``banded``
                change = np.linalg.norm(seen[:, part] @ moved[part])
                assert change <= BOUND * (1 + 1e-9)
                largest = max(largest, change)
    assert largest == pytest.approx(BOUND, rel=1e-4)  # no smaller bound holds


@pytest.mark.parametrize("noise", NOISES)
def test_runs_that_part_share_no_draw_from_there_on(noise) -> None:
    """Two exact resumes, on other data in one step, and on equal sums (no samples) after that.

    If draws were equal where sums are, differences of later steps would be past noise alone.
    """
    run = Run(noise)
    for _ in range(3):
        run.step()
    other = Run(noise).load(run.state(), exact=True)
    same = run.step(3) - other.step(3)
    apart = [run.step(1) - other.step(2), *(run.step() - other.step() for _ in range(2))]

    assert not same.any()
    assert_covariance(apart, 2 * covariance(run.optimizer.strategy, len(apart)))


def load(run: Run) -> None:
    run.load(run.state(), exact=False)


def roll_back(run: Run) -> None:
    state = run.state()
    run.step()
    run.released.pop()
    run.load(state, exact=False)


def fork(run: Run) -> None:
    run.optimizer.keys._process = -1


def discard(run: Run) -> None:
    run.clipping.backward(run.losses(2))
    run.optimizer.discard()


def forget(run: Run) -> None:
    run.clipping.backward(torch.zeros(0))
    run.optimizer.zero_grad()


def leave_parts(run: Run) -> None:
    run.optimizer.signal_skip_step()
    take_step(run.optimizer, run.losses(2))
    run.optimizer.discard()


def interrupt(run: Run) -> None:
    draw, drawn = NoiseOfStep._add_draw, []

    def fail(self, *given) -> None:
        if drawn:
            raise KeyboardInterrupt
        drawn.append(draw(self, *given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseOfStep, "_add_draw", fail)
        with pytest.raises(KeyboardInterrupt):
            run.step(2)
    assert all(p.grad is None for p in run.model.parameters())


def interrupt_and_resume(run: Run) -> None:
    interrupt(run)
    run.load(run.state(), exact=True)


BREAKS = [load, roll_back, fork, discard, forget, leave_parts, interrupt, interrupt_and_resume]


@pytest.mark.parametrize(("noise", "happens"), one_in(2, NOISES, BREAKS))
def test_what_breaks_the_line_of_steps_begins_the_strategy_anew(noise, happens) -> None:
    run = Run(noise)
    for _ in range(3):
        run.step(1)
    happens(run)
    for _ in range(3):
        run.step(1)

    expected = np.kron(np.eye(2), covariance(run.optimizer.strategy, 3))
    assert_covariance(run.released, expected)


@pytest.mark.parametrize(("noise", "inner", "parts"), one_in(2, NOISES, INNER, [1, 2]))
def test_a_captured_step_is_that_of_a_loop(noise, inner, parts, monkeypatch) -> None:
    with simulated_graphs(monkeypatch):
        runs = [Run(noise, inner, d=6, generator=torch.Generator().manual_seed(4)) for _ in "ab"]
        steps = [
            CapturedStep(lambda x, r=r: squares(r.model, x), r.optimizer, 4 // parts) for r in runs
        ]
        for _ in range(5):
            x = torch.randn(4, 6)
            steps[0](x)
            steps[1]._run((x,))
            assert runs[0].optimizer.steps == runs[1].optimizer.steps
        assert steps[0].is_captured
    weights = [torch.cat([p.flatten() for p in run.model.parameters()]) for run in runs]
    assert torch.allclose(*weights, rtol=1e-5, atol=1e-7)
    for one, other in zip(*(run.optimizer.buffers.kept for run in runs), strict=True):
        assert one.any()
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_state_is_a_copy_and_is_secret() -> None:
    run = Run(d=5)
    run.step()
    privacy = run.optimizer.state_dict(exact=True)["privacy"]
    kept = [each.clone() for each in privacy["secrets"]["buffers"]["kept"]]
    run.step()
    for before, after in zip(kept, privacy["secrets"].pop("buffers")["kept"], strict=True):
        assert before.any()
        assert torch.equal(before, after)
    assert not any(
        isinstance(each, torch.Tensor)
        for each in torch.utils._pytree.tree_leaves(
            {name: value for name, value in privacy.items() if name != "secrets"}
        )
    )


def change(run: Run, name: str, value) -> None:
    setattr(run.optimizer, name, value)
    run.step()


def freeze(run: Run) -> None:
    run.model[1].bias.requires_grad_(False)
    run.step(1)


def end(run: Run) -> None:
    for _ in range(STEPS):
        run.step()


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (end, "the noise was correlated for 7 steps, and these are done"),
        (lambda r: change(r, "noise_multiplier", 3.0), r"noise_multiplier is 3\.0, and was 2\.0"),
        (lambda r: change(r, "max_grad_norm", 0.1), r"max_grad_norm is 0\.1, and was 0\.5"),
        (lambda r: change(r, "expected_batch_size", 9), r"expected_batch_size is 9\.0, and was 4"),
        (freeze, "other parameters are trained than in the steps before"),
    ],
)
def test_steps_that_a_strategy_does_not_cover_are_refused(does, told) -> None:
    run = Run(d=5)
    run.step(1)
    before = copy.deepcopy(run.model.state_dict())
    with pytest.raises(RuntimeError, match=told):
        does(run)
    assert all(p.grad is None for p in run.model.parameters())
    if does is not end:
        assert all(torch.equal(p, before[name]) for name, p in run.model.state_dict().items())


def test_settings_and_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"secure_mode protects .* one sum under one draw"):
        Run(secure_mode=True)
    with pytest.raises(ValueError, match="secure_mode protects"):
        Run(d=5).optimizer.secure_mode = True
    with pytest.raises(ValueError, match="bisr is one mechanism for all steps"):
        Run("bisr", d=5).optimizer.attach_step_hook(print)
    with pytest.raises(ValueError, match="count every step at the rate of all samples; add"):
        Run(d=5).optimizer.attach_step_hook(print)
    with pytest.raises(ValueError, match="noise_buffers must be one of device, cpu, and is 'gpu'"):
        Run(noise_buffers="gpu")
    run = Run(d=5)
    state = run.optimizer.state_dict(exact=True)
    for other, told in (
        (Run("bisr", d=5), "made with noise 'banded of 3 bands, 7 steps and 3 folds', and this"),
        (Run(d=5, strategy=None), "and this one with 'independent'"),
    ):
        for exact in (False, True):
            with pytest.raises(ValueError, match=told):
                other.optimizer.load_state_dict(state, exact=exact)
    state["privacy"]["secrets"]["buffers"]["coefficients"][0] += 1e-9
    with pytest.raises(ValueError, match="other coefficients"):
        run.optimizer.load_state_dict(state, exact=True)
    run.optimizer.load_state_dict(state)


def test_check_looks_at_single_steps_and_keeps_past_noise() -> None:
    run = Run(d=6)
    run.step(1)
    kept = [each.clone() for each in run.optimizer.buffers.kept]

    def loss(model, x):
        return model(x).square().sum(1)

    checked = check(run.model, loss, (torch.randn(4, 6),), run.optimizer)
    assert checked.unchecked["the correlation of noise"] == "each step is looked at alone"
    for before, after in zip(kept, run.optimizer.buffers.kept, strict=True):
        assert torch.equal(before, after)
    run.step(1)
    assert run.optimizer.steps == 2


SETTINGS = {"noise": "banded", "bands": 3, "folds": 3, "epochs": 2}


def prepare(**options) -> tuple[Model, PrivateTraining]:
    model = Model().double()
    return model, one_call.prepare(model, **SETTINGS | options)


@pytest.mark.parametrize("noise", NOISES)
def test_one_call_correlates_noise_and_goes_on_to_the_same_bits(noise) -> None:
    runs = [prepare(noise=noise, max_batch_size=2, noise_generator=None) for _ in range(2)]
    (model, private), (other_model, other) = runs
    train(private, model, epochs=1)
    other.load_state_dict(copy.deepcopy(private.state_dict(exact=True)), exact=True)
    for each_model, each in runs:
        train(each, each_model, epochs=1)

    assert torch.equal(weights(model), weights(other_model))
    assert (
        f"correlated Gaussian noise ({noise} of 3 bands, 8 steps and 3 folds" in private.guarantee
    )
    assert private.data_loader.sample_rate == 0.75  # of a fold
    assert private.spent.history == [(1.0, 0.75, 3) if noise == "banded" else (1.0, 1.0, 1)]
    with pytest.raises(RuntimeError, match="correlated for 8 steps, and these are done"):
        train(private, model, epochs=1)


@pytest.mark.parametrize("calls", [[], ["zero_grad"], ["discard"]])
def test_a_batch_that_failed_begins_the_strategy_anew(calls) -> None:
    """It is of a fold, and the next batch of another: a sample would return too early."""
    run = Run(d=8)
    run.step()
    run.step()
    with pytest.raises(ValueError, match="losses"):
        run.clipping.backward(run.losses(2).mean())
    for name in calls:
        getattr(run.optimizer, name)()
    run.step()

    assert run.optimizer.buffers.done == 1


def test_a_batch_that_a_loop_leaves_begins_the_strategy_anew() -> None:
    model, private = prepare()
    train(private, model, epochs=1)
    buffers = private.optimizer.buffers
    assert buffers.kept
    next(iter(private.data_loader))
    train(private, model, epochs=0)
    assert buffers.kept
    next(iter(private.data_loader))  # the batch before had no step
    assert not buffers.kept


@pytest.mark.parametrize("noise", NOISES)
def test_a_loader_that_goes_back_alone_begins_the_strategy_anew(noise) -> None:
    model, private = prepare(noise=noise)
    state = private.data_loader.state_dict(exact=True)
    for _ in range(3):
        private.data_loader.load_state_dict(state)
        batch = next(iter(private.data_loader))
        take_step(private.optimizer, model.losses, *batch)
        assert private.optimizer.buffers.done == 1
    assert private.spent.history[0][2] == 3


def test_all_steps_of_bisr_are_one_mechanism_and_the_budget_has_one_beginning() -> None:
    model, private = prepare(noise="bisr", epsilon=2.0, delta=1e-3, noise_multiplier=None)
    train(private, model, epochs=1)
    assert private.epsilon_spent() == pytest.approx(2.0, rel=0.02)
    assert private.epsilon_spent() <= 2.0
    before = weights(model)
    private.load_state_dict(private.state_dict(exact=True))
    with pytest.raises(RuntimeError, match="the privacy budget is spent: with bisr it is for one"):
        train(private, model, epochs=1)
    assert torch.equal(weights(model), before)

    model, private = prepare(noise="bisr", noise_multiplier=5.0)  # no budget: what is spent counts
    train(private, model, epochs=1)
    private.load_state_dict(private.state_dict(exact=True))
    train(private, model, epochs=1)
    assert private.spent.history == [(5.0, 1.0, 2)]


@pytest.mark.parametrize(
    ("noise", "counted"), [("banded", (1.0, 0.75, 4)), ("bisr", (1.0, 1.0, 2))]
)
@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_run_that_goes_back_counts_what_is_seen_again(noise, counted, is_made_anew) -> None:
    model, private = prepare(noise=noise)
    train(private, model, epochs=1)
    state = copy.deepcopy(private.state_dict(exact=True))
    train(private, model, epochs=1)
    before = private.spent.steps
    if is_made_anew:
        private.remove()
        model, private = prepare(noise=noise, spent=private.spent)
    private.load_state_dict(state, exact=True)
    assert private.spent.steps - before == (2 if noise == "banded" else 1)
    assert private.spent.history == [counted]
    private.load_state_dict(private.state_dict(exact=True), exact=True)  # it goes back behind both
    if noise == "bisr":
        private.optimizer.planned_steps = 8
        with pytest.raises(RuntimeError, match="or this run goes back"):
            private.load_state_dict(state, exact=True)


def test_the_loop_of_the_documentation_runs() -> None:
    class Data:
        def __getitem__(self, chosen):
            return (torch.ones(len(chosen), 3),)

        def __len__(self) -> int:
            return 400

    model = nn.Linear(3, 1)
    names = {"model": model, "dataset": Data(), "total_steps": 20}
    names["sample_losses"] = lambda x: squares(model, x) if len(x) else torch.zeros(0)
    exec(find_code(CORRELATED, "make_strategy"), names)  # noqa: S102

    assert names["optimizer"].steps == 20
    assert names["accountant"].history == [(1.0, 0.32, 3)]


@pytest.mark.slow
def test_the_table_of_the_documentation_is_what_accountants_and_strategies_say() -> None:
    """The noise of a step and of the sum, over independent noise's, at epsilon 8 and 1."""
    text = (ROOT / "docs/how-to/which-mechanism.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `banded-(\d+)` \| (.*) \|$", text, re.MULTILINE)

    def find_noises(epsilon: float, bands: int) -> np.ndarray:
        sampling = Sampling(1024 * bands / 10**6, bands)
        sigma = find_noise(epsilon, 1e-7, 1908, sampling, "prv")
        return sigma * np.array(find_errors(make_strategy("banded", steps=1908, bands=bands)))

    assert len(rows) == 4
    for bands, row in rows:
        told = row.split(" | ")
        for epsilon, place in ((8.0, 0), (1.0, 4)):
            ratios = find_noises(epsilon, int(bands)) / find_noises(epsilon, 1)
            assert told[place : place + 2] == [f"{ratio:.2f}" for ratio in ratios]
