"""A captured step does what an ordinary loop does, whatever the batch is and whatever changes."""

import copy
import gc
import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from documents import FULL_SPEED, find_code
from products import one_in
from simulated_graphs import SimulatedGraphs, simulated_graphs
from small_models import EVERY, NORMALISED, Scale, Small, each_of
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, NAdam
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import BookKeeping, CapturedStep, NoisyOptimizer, UnsupportedError

way = each_of(EVERY)

OPTIMIZERS = {"sgd": lambda ps: SGD(ps, lr=0.1), "adamw": lambda ps: AdamW(ps, lr=0.01)}


@pytest.fixture(autouse=True)
def graphs(request, monkeypatch):
    """Let steps be captured here, unless a test asks for False."""
    is_gpu = getattr(request, "param", True)
    with simulated_graphs(monkeypatch) if is_gpu else nullcontext():
        yield is_gpu


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), Scale(8), nn.Linear(8, 6)),
        nn.RMSNorm(6),
        nn.Linear(6, 3, bias=False),
    )


class Training:
    """A model with everything that trains it, as a captured step or as an ordinary loop."""

    def __init__(
        self, way=BookKeeping, optimizer="adamw", noise=0.7, part_size=4, device="cpu"
    ) -> None:
        self.model = build().to(device)
        self.model[2].scale = torch.ones(8)
        self.clipping = way(self.model, 0.5, public_buffers=["2.scale"])
        self.generator = torch.Generator(device).manual_seed(3)
        self.noise, self.part_size = noise, part_size
        self.step_by(OPTIMIZERS[optimizer](self.model.parameters()))

    def step_by(self, inner) -> "Training":
        self.optimizer = NoisyOptimizer(
            *(inner, self.clipping),
            noise_multiplier=self.noise,
            expected_batch_size=5,
            generator=self.generator,
        )
        self.step = CapturedStep(self.losses_of, self.optimizer, self.part_size)
        return self

    def losses_of(self, x: Tensor) -> Tensor:
        return self.model(x).square().sum((1, 2))

    def loop(self, x: Tensor) -> Tensor:
        return self.step._run((x,))

    def take(self, *sizes: int) -> "Training":
        """Step on batches of these sizes."""
        for x in batches(*sizes):
            self.step(x)
        return self

    @property
    def state(self) -> Tensor:
        own = [*self.model.parameters()]
        for state in self.optimizer.state.values():
            own += [one for one in state.values() if isinstance(one, Tensor)]
        return torch.cat([one.detach().double().cpu().flatten() for one in own])


def batches(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 7, 5, generator=generator) for size in sizes]


def assert_same(captured: Training, loop: Training) -> None:
    """Up to the order of sums: a part that is filled up has products of other sizes."""
    torch.testing.assert_close(captured.state, loop.state, rtol=1e-4, atol=1e-6)
    counts = [
        (t.clipping.batches, t.clipping.nonfinite_samples_total, t.optimizer.steps)
        for t in (captured, loop)
    ]
    assert counts[0] == counts[1]
    assert not any(p.grad is not None for p in captured.optimizer.params)
    assert not captured.clipping.sums.total


def assert_trains_as_a_loop(make, xs, change=lambda _: None, at: int | None = None) -> Training:
    """Make two trainings, and step on batches, captured and not; before one of them change both."""
    captured, loop = make(), make()
    for number, x in enumerate(xs):
        if number == at:
            change(captured)
            change(loop)
        captured.step(x)
        loop.loop(x)
        assert_same(captured, loop)
    assert captured.step.is_captured
    return captured


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("way", [*EVERY, *NORMALISED])
def test_batches_of_any_size_train_as_in_a_loop(way, optimizer) -> None:
    captured, loop = (Training(way, optimizer) for _ in range(2))
    was_captured = []
    for x in batches(6, 4, 9, 0, 3, 1, 12):
        losses = captured.step(x)
        was_captured.append(captured.step.is_captured)

        torch.testing.assert_close(losses, loop.loop(x), rtol=1e-4, atol=1e-6)
        assert_same(captured, loop)
    assert was_captured == [False, *[True] * 6]
    norms = [t.clipping.sample_norms for t in (captured, loop)]
    torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)
    assert SimulatedGraphs.captured == 4  # first and further parts, noise and step


def test_full_parts_give_the_same_bits() -> None:
    captured, loop = (Training(optimizer="sgd") for _ in range(2))
    for x in batches(4, 8, 4, 8):
        captured.step(x)
        loop.loop(x)

    assert captured.step.is_captured
    assert torch.equal(captured.state, loop.state)


class Classifier(nn.Module):
    """It has a token for all samples, positions that are looked up once, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(5))
        self.positions = nn.Embedding(7, 5)
        self.recurrent = nn.LSTM(5, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x + self.token + self.positions(torch.arange(7)[None]))[0]


def leaf_node(parameter: Tensor):
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("make", [build, Classifier])
def test_nothing_keeps_the_graph_of_a_step(way, make, is_refused) -> None:
    """On a GPU the node of a parameter that outlives its step remembers the stream of that step.

    A capture on another one would end in cudaErrorStreamCaptureIsolation.
    """
    model = make()
    clipping = way(model, 0.5)
    for parameter in model.parameters():
        leaf_node(parameter).metadata["is of the step"] = True
        assert not leaf_node(parameter).metadata  # nobody kept it

    losses = model(batches(3)[0]).square().sum((1, 2))
    if is_refused:  # after the graph was read: it mixes samples
        losses = losses + losses.roll(1)
    nodes = [leaf_node(parameter) for parameter in model.parameters()]
    for node in nodes:
        node.metadata["is of the step"] = True
    del node, nodes
    if is_refused:
        with pytest.raises(UnsupportedError, match="mixes samples"):
            clipping.backward(losses)
    else:
        clipping.backward(losses)
    del losses
    gc.collect()  # an error and its traceback hold each other
    assert not any(leaf_node(parameter).metadata for parameter in model.parameters())


@pytest.mark.parametrize(
    ("way", "value"), one_in(2, [*EVERY, NORMALISED[1]], [math.nan, math.inf, 1e30])
)
def test_a_sample_that_is_not_finite_is_excluded_and_counted(way, value) -> None:
    xs = batches(6, 6, 6, 6)
    xs[2][5, 0, 0] = value
    captured = assert_trains_as_a_loop(lambda: Training(way), xs)
    assert captured.clipping.nonfinite_samples_total >= 1 or value == 1e30


CHANGES = {
    "C": lambda t: setattr(t.optimizer, "max_grad_norm", 0.1),
    "noise": lambda t: setattr(t.optimizer, "noise_multiplier", 5.0),
    "no noise": lambda t: setattr(t.optimizer, "noise_multiplier", 0.0),
    "expected size": lambda t: setattr(t.optimizer, "expected_batch_size", 50),
    "reduction": lambda t: setattr(t.optimizer, "loss_reduction", "sum"),
    "rate": lambda t: t.optimizer.param_groups[0].update(lr=0.05),
    "decay": lambda t: t.optimizer.param_groups[0].update(weight_decay=0.3),
    "frozen": lambda t: t.model[0].weight.requires_grad_(requires_grad=False),
    "mode": lambda t: t.model.insert(3, nn.Dropout(0.0)),
    "attribute": lambda t: setattr(t.model[1], "eps", 0.3),
    "hook": lambda t: t.model[0].register_forward_hook(lambda *given: given[2] * 2),
    "data": lambda t: setattr(t.model[0].weight, "data", torch.ones(8, 5)),
    "in place": lambda t: t.model[0].weight.data.fill_(0.1),
    "state": lambda t: t.optimizer.load_state_dict(
        copy.deepcopy(t.optimizer.state_dict(exact=True)), exact=True
    ),
    "another shape": lambda _: None,
}


@pytest.mark.parametrize(("change", "optimizer"), one_in(2, CHANGES, OPTIMIZERS))
def test_a_change_changes_the_next_step(change, optimizer) -> None:
    xs = batches(5, 5, 5, 5, 5)
    if change == "another shape":
        xs[2] = xs[2][:, :2]
    assert_trains_as_a_loop(lambda: Training(optimizer=optimizer), xs, CHANGES[change], at=2)


def test_a_rate_that_a_scheduler_changes_needs_no_other_graph() -> None:
    captured = Training()
    schedule = torch.optim.lr_scheduler.LambdaLR(captured.optimizer, lambda at: 1 / (1 + at))
    for x in batches(4, 4, 4, 4):
        captured.step(x)
        schedule.step()
    assert SimulatedGraphs.captured == 3


def test_each_replay_draws_other_noise() -> None:
    training = Training(optimizer="sgd")
    moved = []
    zeros = [torch.zeros(4, 7, 5)] * 4
    for x in zeros:
        before = training.model[6].weight.detach().clone()
        training.step(x)
        moved.append(training.model[6].weight.detach() - before)

    assert training.step.is_captured
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(moved))


def test_a_graph_that_repeats_its_noise_is_refused(monkeypatch) -> None:
    training = Training().take(4, 4)
    graphs = training.step._replays._graphs
    replay = graphs._noise

    def repeat() -> None:
        state = training.generator.get_state()
        replay()
        training.generator.set_state(state)

    monkeypatch.setattr(graphs, "_noise", repeat)
    before = training.state
    with pytest.raises(RuntimeError, match="drew no new noise, so nothing was applied"):
        training.take(4)

    assert torch.equal(training.state, before)
    assert training.optimizer.steps == 3  # counted where noise is drawn
    assert not training.step.is_captured


HOOKS = {
    "noise": lambda o: setattr(o, "noise_multiplier", 5.0),
    "C": lambda o: setattr(o, "max_grad_norm", 0.01),
    "rate": lambda o: o.param_groups[0].update(lr=1e-3),
    "decay": lambda o: o.param_groups[0].update(weight_decay=0.5),
    "betas": lambda o: o.param_groups[0].get("betas", [0]).__setitem__(0, 0.1),
}


@pytest.mark.parametrize(("at", "optimizer", "change"), one_in(4, [1, 2, 3, 4], OPTIMIZERS, HOOKS))
def test_a_hook_changes_what_follows_it_as_in_a_loop(change, optimizer, at) -> None:
    def make() -> Training:
        training = Training(optimizer=optimizer)
        group = training.optimizer.param_groups[0]
        if "betas" in group:
            group["betas"] = list(group["betas"])
        count = itertools.count(1)
        training.optimizer.attach_step_hook(
            lambda o: HOOKS[change](o) if next(count) == at else None
        )
        return training

    assert_trains_as_a_loop(make, batches(4, 4, 0, 4, 4, 4))


class Counting(SGD):
    """Counts its steps in Python, and makes its state anew."""

    def step(self, _=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = 0.5 * state.get("mean", 0.0) + parameter.grad
                parameter.data.sub_(state["mean"] * group["lr"] / state["count"])


@pytest.mark.parametrize("make", [Counting, Adagrad, NAdam])
def test_an_optimizer_that_does_something_in_python_steps_there(make) -> None:
    def begin() -> Training:
        training = Training()
        return training.step_by(make(training.model.parameters(), lr=0.1))

    assert_trains_as_a_loop(begin, batches(4, 4, 6, 4))
    assert SimulatedGraphs.captured == 3  # first and further parts, and noise


@pytest.mark.parametrize("rate", [1, torch.tensor(0.1)], ids=str)
def test_a_rate_of_any_kind_is_that_of_the_loop(rate) -> None:
    captured, loop = (Training() for _ in range(2))
    for training in (captured, loop):
        training.step_by(AdamW(training.model.parameters(), lr=copy.copy(rate), foreach=False))
    for number, x in enumerate(batches(4, 4, 4, 4)):
        if number == 3:
            captured.optimizer.param_groups[0]["lr"] = 0.001
            loop.optimizer.param_groups[0]["lr"] = 0.001
        captured.step(x)
        loop.loop(x)
        torch.testing.assert_close(captured.state, loop.state, rtol=1e-3, atol=1e-4)


def test_parameters_that_the_optimizer_does_not_have_are_refused() -> None:
    training = Training()
    training.step_by(SGD(training.model[6].parameters(), lr=0.1))
    for x in batches(4, 4):
        with pytest.raises(RuntimeError, match="is clipped, and this optimizer does not train it"):
            training.step(x)


@pytest.mark.parametrize("change", ["wrapped again", "removed"])
def test_an_old_step_is_refused_as_a_loop_is(change) -> None:
    training = Training().take(4, 4)
    before, step = training.state, training.step
    if change == "removed":
        training.clipping.remove()
    else:
        training.step_by(training.optimizer.original_optimizer)

    with pytest.raises(RuntimeError, match=r"NoisyOptimizer took over|clipping was removed"):
        step(batches(4)[0])
    assert torch.equal(training.state, before)


def test_hooks_of_the_inner_optimizer_run_in_each_step() -> None:
    training, calls = Training(), []
    for number, x in enumerate(batches(4, 4, 4, 4, 4)):
        if number == 2:
            training.optimizer.original_optimizer.register_step_post_hook(
                lambda *_: calls.append(training.optimizer.steps)
            )
        training.step(x)

    assert len(calls) == 3
    assert training.step.is_captured


def test_a_tensor_that_a_module_holds_is_looked_at() -> None:
    def make() -> Training:
        training = Training()
        training.model[2].forward = lambda x: x * training.model[2].scale
        return training

    def change(training: Training) -> None:
        training.model[2].scale = torch.full((8,), 0.1)

    assert_trains_as_a_loop(make, batches(4, 4, 4, 4, 4), change, at=2)


def test_what_a_graph_reads_outlives_the_one_who_had_it() -> None:
    training = Training()
    weights = [torch.full((3,), 0.5)]
    training.step._replays.losses_of = lambda x: (
        (training.model(x) * weights[0]).square().sum((1, 2))
    )
    training.take(4, 4)
    held = {storage.data_ptr() for storage in training.step._replays._graphs._held}

    assert weights.pop().data_ptr() in held
    training.take(4)


def test_inputs_with_gradients_and_an_empty_first_batch_train(way) -> None:
    training = Training()
    training.clipping.remove()
    training.clipping = way(training.model, 0.5, first_batch="trusted")
    training.step_by(SGD(training.model.parameters(), lr=0.1))
    for x in batches(0, 4, 6, 4):
        training.step(x.requires_grad_())

    assert training.step.is_captured


def test_a_buffer_that_changes_between_steps_is_refused() -> None:
    training = Training()
    training.model.append(Scale(3))
    training.model[-1].register_buffer("seen", torch.zeros(1))
    training.clipping.remove()
    training.clipping = BookKeeping(training.model, 0.5)
    training.step_by(SGD(training.model.parameters(), lr=0.1)).take(4, 4)
    assert training.step.is_captured
    before = training.model[0].weight.detach().clone()
    training.model[-1].seen.data.fill_(7)

    with pytest.raises(RuntimeError, match=r"7\.seen was changed through \.data"):
        training.take(4)
    assert torch.equal(before, training.model[0].weight)
    assert not training.optimizer.is_within_a_batch


def test_code_that_waits_for_the_device_is_refused() -> None:
    training = Training()
    training.step._replays.losses_of = lambda x: training.losses_of(x) * float(x.sum().item() != 0)
    training.take(4)
    before = training.state

    with pytest.raises(RuntimeError, match="not permitted"):
        training.take(4)
    assert torch.equal(before[: len(training.state)], training.state)
    assert not training.optimizer.is_within_a_batch
    assert training.clipping.batches == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "their lengths are: none"),
        ((torch.zeros(4, 7, 5), torch.zeros(3)), "their lengths are: 4, 3"),
        ((torch.zeros(4, 7, 5, device="meta"),), "the batch is on meta and the model on cpu"),
    ],
)
def test_what_is_no_batch_is_refused(batch, message) -> None:
    with pytest.raises(ValueError, match=message):
        Training().step(*batch)


def test_a_step_within_a_batch_is_refused() -> None:
    training = Training()
    [x] = batches(4)
    training.clipping.backward(training.losses_of(x))

    with pytest.raises(RuntimeError, match="a batch is not finished"):
        training.step(x)
    training.optimizer.discard()
    training.step(x)


def test_a_part_has_a_sample() -> None:
    with pytest.raises(ValueError, match="part_size must be at least 1, and is 0"):
        Training(part_size=0)


@pytest.mark.parametrize("graphs", [True, False], indirect=True)
def test_the_loop_in_the_documents_trains(graphs) -> None:
    model = Small("layer norm", 6, 9, bias=True)
    before = [p.detach().clone() for p in model.parameters()]
    loader = DataLoader(TensorDataset(*torch.randint(6, (2, 90, 5)).unbind()), batch_size=18)
    names = {"model": model, "data_loader": loader}

    loop = find_code(FULL_SPEED, "CapturedStep")
    if graphs:  # a CPU has no 16-bit products into float32, which a GPU would run
        loop = loop.replace("torch.bfloat16)", "enabled=False)")
    exec(loop, names)  # noqa: S102

    assert names["step"].is_captured == graphs
    (steps,) = (count for _, _, count in names["accountant"].history)
    assert steps == names["optimizer"].steps == len(names["data_loader"]) == 5
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False], indirect=True)
def test_on_a_gpu_full_parts_give_the_same_bits(graphs, way) -> None:
    captured, loop = (Training(way, "sgd", device="cuda") for _ in range(2))
    for x in batches(4, 8, 4, 8, 12):
        captured.step(x.cuda())
        loop.loop(x.cuda())

    assert captured.step.is_captured
    assert torch.equal(captured.state, loop.state)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False], indirect=True)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_on_a_gpu_batches_of_any_size_train_as_in_a_loop(graphs, way, optimizer) -> None:
    captured, loop = (Training(way, optimizer, device="cuda") for _ in range(2))
    xs = batches(6, 4, 9, 0, 3, 1, 12, 7, 5)
    xs[-2][5, 0, 0] = math.nan
    for x in xs:
        losses, expected = captured.step(x.cuda()), loop.loop(x.cuda())
        torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-5, equal_nan=True)
        assert_same(captured, loop)
    assert captured.clipping.nonfinite_samples_total == 1
    assert captured.step.is_captured
