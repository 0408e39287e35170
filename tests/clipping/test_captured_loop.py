"""``make_private`` runs steps as CUDA graphs by default, with the numbers of the ordinary loop."""

import copy
import logging
import math
import random

import pytest
import torch
from one_call import D, Model, prepare, seeded, weights
from simulated_graphs import SimulatedGraphs, simulated_graphs
from small_models import TINY, take_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import causal_lm_losses
from dpprof.private.loop.captured_parts import find_part_size


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    with simulated_graphs(monkeypatch):
        yield


def loop(private, losses_of, epochs: int = 2, after=lambda _: None) -> int:
    """Train as the documents show; returns how many parts were replayed."""
    _, optimizer, loader = private
    replayed = number = 0
    for _ in range(epochs):
        for batch in loader:
            losses_B = optimizer.backward(losses_of, *batch)
            assert not losses_B.requires_grad
            replayed += optimizer.captured is not None and optimizer.captured.is_open
            optimizer.step()
            optimizer.zero_grad()
            number += 1
            after(number)
    return replayed


def assert_trains_as_a_loop(make=Model, losses_of=None, after=None, **options) -> int:
    """Train twice, captured and eagerly; returns how many parts were replayed."""
    replayed = {}
    states = {}
    for execution in ("auto", "eager"):
        torch.manual_seed(4)
        model = make().double()
        compute = losses_of(model) if losses_of else model.losses
        given = {"execution": execution, "losses_of": compute, "check": False} | options
        private = prepare(model, **given)
        change = (lambda _: None) if after is None else after(private)
        replayed[execution] = loop(private, compute, after=change)
        states[execution] = private
    captured, eager = states["auto"], states["eager"]
    torch.testing.assert_close(weights(captured.model), weights(eager.model), rtol=1e-5, atol=1e-7)
    for name in ("steps", "is_within_a_batch", "is_last_part"):
        assert getattr(captured.optimizer, name) == getattr(eager.optimizer, name)
    clippings = [one.optimizer.clipping for one in (captured, eager)]
    assert len({one.nonfinite_samples_total for one in clippings}) == 1
    assert captured.spent.history == eager.spent.history
    assert replayed["eager"] == 0
    return replayed["auto"]


@pytest.mark.parametrize(
    ("method", "max_batch_size"), [("flash-bk", None), ("flash-bk", 4), ("flash", 2)]
)
def test_a_loop_is_captured_without_being_asked(method, max_batch_size) -> None:
    options = {"max_batch_size": max_batch_size, "method": method}
    assert assert_trains_as_a_loop(**options) > 4


def test_truncated_batches_are_one_replay_of_one_graph_each() -> None:
    parts = []

    def after(private):
        if private.optimizer.captured is not None:
            assert private.optimizer.captured._replays.part_size == 3
        return lambda _: parts.append(private.data_loader.is_last_part)

    assert assert_trains_as_a_loop(after=after, truncated_batch_size=3) > 4
    assert all(parts)


def test_noise_that_changes_between_backward_and_step_is_that_of_the_step() -> None:
    trained = []
    for execution in ("auto", "eager"):
        model, optimizer, loader = prepare(Model().double(), execution=execution)
        for batch in loader:
            optimizer.backward(model.losses, *batch)
            optimizer.noise_multiplier += 0.5
            optimizer.step()
            optimizer.zero_grad()
        trained.append(weights(model))
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-7)


def reads_numbers(model):
    return lambda x, y: model.losses(x, y) * float(y.abs().max().item() > -1)


def draws_by_python(model):
    own = random.Random(0)  # noqa: S311 (no secret)
    return lambda x, y: model.losses(x, y) * (1 + 0 * own.random())


def lists_numbers(model):
    return lambda x, y: model.losses(x, y) * len(y.tolist()) / len(y)


@pytest.mark.parametrize("losses_of", [reads_numbers, draws_by_python, lists_numbers])
def test_what_no_graph_can_do_goes_on_eagerly_and_says_so_once(losses_of, caplog) -> None:
    with caplog.at_level(logging.WARNING, "dpprof"):
        assert assert_trains_as_a_loop(losses_of=losses_of) == 0
    [record] = caplog.records
    assert record.message.startswith("steps run as an ordinary loop, and not as CUDA graphs: ")
    assert len(record.message.splitlines()) == 1


def test_what_losses_say_of_a_sample_is_not_logged(caplog) -> None:
    model, calls = Model().double(), []

    def losses_of(x, y):
        calls.append(len(x))
        if len(calls) == 2:  # the first of the captured ones
            raise ValueError(f"no negative for {y[0]}")
        return model.losses(x, y)

    _, optimizer, loader = prepare(model, losses_of=model.losses)
    with caplog.at_level(logging.WARNING, "dpprof"):
        for batch in loader:
            take_step(optimizer, losses_of, *batch)
    [record] = caplog.records
    assert record.message.endswith(": one raises ValueError")


class Masked(Model):
    """Reads in Python whether there is something to mask, as models of transformers do."""

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        if (x[:, 0] > -0.9).all():
            return 2 * super().losses(x, y)
        return super().losses(x.where(x > -0.9, x.new_zeros(())), y)


def test_another_answer_that_python_reads_is_that_of_the_batch(caplog) -> None:
    """Some batches have an answer, and others another: neither is taken for the other's."""
    with caplog.at_level(logging.WARNING, "dpprof"):
        replayed = assert_trains_as_a_loop(Masked, max_batch_size=2)
    assert replayed > 4


@pytest.mark.parametrize("kind", ["words", "number", "whole"])
def test_a_batch_of_other_things_than_rows_goes_on_eagerly(kind, caplog) -> None:
    other = {"words": ["a", "b"], "number": 1.0, "whole": torch.ones(D)}[kind]

    def losses_of(model):
        return lambda x, y, _=other: model.losses(x, y)

    model = Model().double()
    private = prepare(model, losses_of=model.losses)
    _, optimizer, loader = private
    compute = losses_of(model)
    with caplog.at_level(logging.WARNING, "dpprof"):
        for x, y in loader:
            take_step(optimizer, compute, x, y, other)
    [record] = caplog.records
    told = {"words": "has a str", "number": "has a float", "whole": "has a Tensor"}[kind]
    assert told in record.message


class Checkpointed(Model):
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = checkpoint(self.layers, x, use_reentrant=False)
        return (hidden[:, 0] - y).square()


def test_checkpointing_is_captured_or_goes_on_eagerly() -> None:
    assert_trains_as_a_loop(Checkpointed)


class Dropped(Model):
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return super().losses(nn.functional.dropout(x, 0.5), y)


def test_dropout_is_drawn_in_each_replay() -> None:
    model = Dropped().double()
    _, optimizer, loader = prepare(model, noise_multiplier=0.0, check=False)
    x, y = torch.ones(6, D).double(), torch.ones(6).double()
    seen = []
    for _ in range(3):
        for _ in loader:
            part = optimizer._part
            optimizer._part = part._replace(size=6)
            seen.append(tuple(optimizer.backward(model.losses, x, y).tolist()))
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.captured.is_captured
    assert len(set(seen)) == len(seen)


def test_losses_and_their_function_may_alternate_between_batches() -> None:
    trained = []
    for is_function in (lambda number: number % 3 > 0, lambda _: False):
        model = Model().double()
        private = prepare(model)
        number = 0
        for _ in range(3):
            for batch in private.data_loader:
                if is_function(number):
                    private.optimizer.backward(model.losses, *batch)
                else:
                    private.optimizer.backward(model.losses(*batch))
                private.optimizer.step()
                private.optimizer.zero_grad()
                number += 1
        trained.append(weights(model))
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-7)


def test_losses_beside_parts_that_were_replayed_are_refused() -> None:
    model = Model().double()
    private = prepare(model, max_batch_size=1)
    loop(private, model.losses)
    parts = iter(private.data_loader)
    take_step(private.optimizer, model.losses, *next(parts))
    with pytest.raises(RuntimeError, match="give backward the same for all parts"):
        private.optimizer.backward(model.losses(*next(parts)))


def test_a_batch_whose_parts_have_other_shapes_is_clipped_whole() -> None:
    """Its first parts are replayed, then they are clipped again, with the others."""
    x = torch.randn(24, D, generator=seeded(1), dtype=torch.float64)

    def losses_of(model):
        return lambda x, y: model.losses(x[:, :D], y)

    def widen(samples):
        x, y = torch.utils.data.default_collate(samples)
        return (torch.cat([x, x], 1) if y.sum() > 4 else x), y

    data = TensorDataset(x, x.sum(1))
    loader = DataLoader(data, batch_size=6, collate_fn=widen)
    assert_trains_as_a_loop(losses_of=losses_of, data_loader=loader, max_batch_size=2)


@pytest.mark.parametrize("end", ["discard", "zero_grad", "iterate again"])
def test_a_batch_that_is_left_is_forgotten(end) -> None:
    model = Model().double()
    private = prepare(model, max_batch_size=1, noise_multiplier=0.0)
    loop(private, model.losses)
    before = weights(model)
    parts = iter(private.data_loader)
    batch = next(parts)
    private.optimizer.backward(model.losses, *batch)
    assert private.optimizer.captured.is_open
    with pytest.raises(RuntimeError, match="within a batch"):
        private.state_dict(exact=True)
    if end == "iterate again":
        next(iter(private.data_loader))
    else:
        getattr(private.optimizer, end)()
    assert not private.optimizer.captured.is_open
    assert not private.optimizer.clipping.sums.total
    assert torch.equal(weights(model), before)


def test_an_error_of_the_users_is_raised_and_the_part_is_clipped_next() -> None:
    model, failing = Model().double(), []

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        if failing:
            raise KeyError(failing.pop())
        return model.losses(x, y)

    private = prepare(model, max_batch_size=2, check=False)
    _, optimizer, loader = private
    for number, batch in enumerate(loader):
        if number == 2:
            optimizer.captured._replays.forget()  # so that Python runs
            failing += ["once", "once"]
            with pytest.raises(KeyError, match="once"):
                optimizer.backward(losses_of, *batch)
        take_step(optimizer, losses_of, *batch)
    assert optimizer.steps == len(loader)


def test_steps_are_verified_again_as_often_as_without_graphs(monkeypatch) -> None:
    compared = []
    monkeypatch.setattr(
        "dpprof.private.samples.repeated_checks.RepeatedChecks.compare",
        lambda *_, **__: compared.append(1) or [],
    )
    model = Model().double()
    private = prepare(model, verify_every=2, check=False)
    torch.manual_seed(0)
    replayed = loop(private, model.losses, epochs=20)
    assert 20 <= len(compared) <= 60  # of 80 steps
    assert replayed > 10


def test_graphs_outlive_an_epoch() -> None:
    model = Model().double()
    loop(prepare(model, max_batch_size=2), model.losses, epochs=6)
    assert SimulatedGraphs.captured == 4


def test_a_function_made_in_each_step_is_the_same() -> None:
    model, optimizer, loader = prepare(Model().double())
    for batch in loader:

        def losses_of(x: Tensor, y: Tensor) -> Tensor:
            return model.losses(x, y)

        take_step(optimizer, losses_of, *batch)
    assert optimizer.captured.is_captured


SCALE = 1.0


def scaled(model):
    return lambda x, y: SCALE * model.losses(x, y)


def test_a_variable_that_the_function_names_is_read_anew(monkeypatch) -> None:
    def after(private):
        def change(_: int) -> None:
            monkeypatch.setitem(globals(), "SCALE", 1.0 if private.optimizer.steps < 4 else 5.0)

        return change

    assert assert_trains_as_a_loop(losses_of=scaled, after=after) > 2


def test_arguments_beside_losses_are_refused() -> None:
    model, optimizer, loader = prepare(Model().double())
    x, y = next(iter(loader))
    with pytest.raises(TypeError, match="either losses, or their function"):
        optimizer.backward(model.losses(x, y), x)


@pytest.mark.parametrize(
    ("expected", "most", "size"),
    [(4, None, 6), (64, None, 23), (0.01, None, 1), (64, 8, 8), (8, 64, 8), (1e4, None, 283)],
)
def test_the_size_of_a_graph(expected, most, size) -> None:
    assert find_part_size(expected, most) == size


def read_images(model):
    return lambda x, y: (model(x.reshape(-1, 1, 1, D).expand(-1, 2, 4, D))[:, 0] - y).square()


def read_tokens(model):
    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        ids = (3 * x).long() % 17
        return causal_lm_losses(model, ids, ids, keep=True)

    return losses_of


def convolutions() -> nn.Module:
    layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1)
    return nn.Sequential(*layers)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, vocab_size=17))


@pytest.mark.parametrize(
    ("make", "losses_of"),
    [
        (convolutions, read_images),
        (llama, read_tokens),
    ],
    ids=["convolutions", "head in chunks, kept"],
)
def test_models_of_many_kinds_are_captured(make, losses_of) -> None:
    assert assert_trains_as_a_loop(make, losses_of=losses_of) > 4


def test_a_bound_that_changes_before_a_step_is_that_of_every_later_graph() -> None:
    """Without noise, on long gradients: each step's sum over what C allows it."""
    x = 100 * torch.randn(24, D, generator=seeded(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=6)
    model = Model().double()
    options = {"noise_multiplier": 0.0, "max_grad_norm": 5.0, "data_loader": loader}
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    _, optimizer, parts = prepare(model, optimizer=sgd, check=False, **options)
    shares = []
    while optimizer.steps < 8:
        for batch in parts:
            before = weights(model)
            optimizer.backward(model.losses, *batch)
            if optimizer.steps == 3:
                optimizer.max_grad_norm = 0.01
            most = len(batch[0]) * optimizer.max_grad_norm / optimizer.expected_batch_size
            optimizer.step()
            optimizer.zero_grad()
            shares.append(float((before - weights(model)).norm()) / most)

    assert optimizer.captured.is_captured
    assert max(shares) <= 1 + 1e-5


def test_a_batch_that_its_owner_writes_again_is_the_one_that_was_drawn() -> None:
    """Parts come in one buffer, and a sample that is not finite has all clipped again."""
    trained = []
    for execution in ("auto", "eager"):
        model = Model().double()
        x = torch.randn(24, D, generator=seeded(1), dtype=torch.float64)
        x[11, 2] = math.nan
        loader = DataLoader(TensorDataset(x, torch.zeros(24).double()), batch_size=6)
        private = prepare(model, data_loader=loader, max_batch_size=2, execution=execution)
        buffer = torch.zeros(2, D).double()
        for _ in range(3):
            for own, y in private.data_loader:
                part = buffer[: len(own)].copy_(own)
                take_step(private.optimizer, model.losses, part, y)
        trained.append(weights(model))
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("where", ["capture", "step"])
def test_an_interrupt_leaves_no_part_behind(where, monkeypatch) -> None:
    model = Model().double()
    private = prepare(model, max_batch_size=2)
    _, optimizer, loader = private
    loop(private, model.losses)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    name = "add" if where == "capture" else "finish"
    parts = iter(loader)
    batch = next(parts)

    def go_on() -> None:
        nonlocal batch
        for _ in range(9):
            take_step(optimizer, model.losses, *batch)
            batch = next(parts)

    with monkeypatch.context() as patched:
        patched.setattr(optimizer.captured._replays, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            go_on()
    assert not optimizer.captured.is_open
    assert not optimizer.is_within_a_batch
    with pytest.raises(RuntimeError, match="not drawn by the private data loader"):
        optimizer.backward(model.losses, *batch)


def test_a_part_is_clipped_once_also_if_an_interrupt_left_it_behind() -> None:
    model = Model().double()
    private = prepare(model, max_batch_size=2)
    loop(private, model.losses)
    batch = next(iter(private.data_loader))
    part = private.optimizer._part
    private.optimizer.backward(model.losses, *batch)
    with pytest.raises(RuntimeError, match="clipped before"):
        private.optimizer.backward(model.losses, *batch)
    private.optimizer._part = part  # as if the interrupt came before it was taken away
    with pytest.raises(RuntimeError, match="had no step"):
        private.optimizer.backward(model.losses, *batch)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop])
def test_a_gradient_that_somebody_keeps_stays_as_it_was(make) -> None:
    model = Model().double()
    private = prepare(model, optimizer=make(model.parameters(), lr=0.1), noise_multiplier=0.0)
    inner, kept = private.optimizer.original_optimizer, []
    weight = model.layers[0].weight
    inner.register_step_post_hook(lambda *_: kept.append((weight.grad, weight.grad.clone())))
    assert loop(private, model.losses) > 2
    assert all(torch.equal(own, copy) for own, copy in kept)
    assert len({own.data_ptr() for own, _ in kept}) == len(kept)


def test_an_exact_resume_by_another_execution_is_refused() -> None:
    captured, eager = (prepare(Model().double(), execution=one) for one in ("auto", "eager"))
    for own, other in ((captured, eager), (eager, captured)):
        with pytest.raises(ValueError, match="one of both runs replays CUDA graphs"):
            own.load_state_dict(other.state_dict(exact=True), exact=True)
        own.load_state_dict(other.state_dict(exact=True))


def test_where_nothing_is_ever_replayed_a_warning_says_so(caplog) -> None:
    sizes = iter(range(1, 1000))

    def widen(samples):
        x, y = torch.utils.data.default_collate(samples)
        return torch.nn.functional.pad(x, (0, next(sizes))), y

    x = torch.randn(24, D, generator=seeded(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=6, collate_fn=widen)
    model = Model().double()

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return model.losses(x[:, :D], y)

    private = prepare(model, losses_of=losses_of, data_loader=loader, check=False)
    with caplog.at_level(logging.WARNING, "dpprof"):
        assert loop(private, losses_of, epochs=20) == 0
    [record] = caplog.records
    assert "change too often" in record.message


def test_a_batch_that_cannot_be_clipped_again_is_thrown_away() -> None:
    """Its first part must not meet the next batch, in which its samples may be again."""
    model = Model().double()
    x = torch.randn(24, D, generator=seeded(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.ones(24).double()), batch_size=20)
    private = prepare(model, data_loader=loader, max_batch_size=8, check=False)

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        if (x > 50).any():
            raise ValueError("this is too large")
        return model.losses(x, y)

    loop(private, losses_of)
    optimizer, steps, before = private.optimizer, private.optimizer.steps, weights(model)

    def go_on() -> None:
        for own, y in private.data_loader:
            inputs = own.clone()
            inputs[0] = 100.0 if optimizer.is_last_part else inputs[0]
            optimizer.backward(losses_of, inputs, y)
            assert optimizer.captured.is_open  # replayed, with the answer of the capture
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ValueError, match="too large"):
        go_on()
    assert not optimizer.clipping.sums.total
    assert not optimizer.is_within_a_batch
    assert optimizer.steps == steps
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_a_parameter_that_trains_after_a_state_gets_its_state_in_a_loop(make) -> None:
    """A graph that makes a momentum would make it anew in each step."""
    momentum = {"momentum": 0.9} if make is torch.optim.SGD else {}
    trained = []
    for execution in ("auto", "eager"):
        states: list[dict] = []
        for is_frozen in (True, False):
            model = Model().double()
            own = make(model.parameters(), lr=0.01, **momentum)
            private = prepare(model, optimizer=own, execution=execution)
            if states:
                private.load_state_dict(states[0], exact=True)
            model.layers[0].weight.requires_grad_(not is_frozen)
            loop(private, model.losses, epochs=3)
            states.append(copy.deepcopy(private.state_dict(exact=True)))
        trained.append(weights(model))
    # AdamW counts its steps in float32 on a device.
    torch.testing.assert_close(*trained, rtol=1e-3, atol=1e-4)


class Counting(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().losses(x, y)


def test_a_buffer_does_not_tell_how_many_graphs_a_batch_took(caplog) -> None:
    calls = []
    for execution in ("auto", "eager"):
        model = Counting().double()
        options = {"public_buffers": ["calls"], "check": False}
        private = prepare(model, execution=execution, **options)
        with caplog.at_level(logging.WARNING, "dpprof"):
            loop(private, model.losses, epochs=4)
        calls.append(float(model.calls))
    assert calls[0] == calls[1]
    assert "the model writes a buffer in forward" in caplog.text
