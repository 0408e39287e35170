"""Which method ``make_private`` takes by itself, and what that does to the model: nothing."""

import logging

import pytest
import torch
from factory import make_experiment
from small_models import is_clear
from torch import nn
from torch.nn import functional

from dpprof.ask import automatic
from dpprof.ask.automatic import choose_method, compare
from dpprof.experiments.config.datasheets import L4
from dpprof.predict.estimate import estimate
from dpprof.private import BookKeeping, linear_cross_entropy
from dpprof.private.loop.method_choice import FirstBatch
from dpprof.subjects.models.build import build_model

B, T, V = 4, 16, 50
DIMENSIONS = {"vocab_size": V, "d_model": 16, "layers": 1, "heads": 2}
HERE = {"batch_size": B, "target": L4, "memory_limit_bytes": 2**30, "optimizer": "adamw"}
FIELDS = {"model": DIMENSIONS, "seq_len": T, "device": "cuda"}


class Loop:
    """A user's model and losses, which put the batch on a GPU as on a machine that has one."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.model = build_model(make_experiment(model=DIMENSIONS, seq_len=T))
        self.dtype = dtype

    def losses_of(self, tokens, labels):
        tokens, labels = tokens.to("cuda:0"), labels.cuda()
        with torch.autocast("cuda", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            logits = self.model(tokens)
        losses = functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), reduction="none"
        )
        return losses.view(labels.shape).mean(1)

    def draw(self) -> FirstBatch:
        tokens = torch.randint(V, (2, T + 1))
        return FirstBatch(
            self.losses_of, [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()], len(tokens)
        )


@pytest.fixture
def predicted(monkeypatch):
    """What was predicted, by method."""
    found = {}
    real = automatic._predict

    def keep(estimate, fields):
        found[fields["method"]] = real(estimate, fields)
        return found[fields["method"]]

    monkeypatch.setattr(automatic, "_predict", keep)
    return found


class HeadInChunks(Loop):
    """Losses that call a part of the model, and take the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(V, 16), nn.Linear(16, 16))
        self.model = nn.Sequential(self.body, nn.Linear(16, V))

    def losses_of(self, tokens, labels):
        return linear_cross_entropy(self.body(tokens), self.model[1], labels).mean(1)


def test_parts_of_the_model_may_be_called_and_read(predicted) -> None:
    loop = HeadInChunks()
    chosen, _ = compare(loop.model, loop.draw(), **HERE)

    assert all(0 < step_s < 1 and fits for step_s, fits in predicted.values())
    assert chosen in predicted
    assert loop.model[0] is loop.body
    first = loop.draw()
    clipping = BookKeeping(loop.model, 0.1)  # as make_private goes on
    clipping.check(first.losses_of, *first.batch)
    clipping.remove()


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.slow), torch.bfloat16])
def test_a_users_loop_is_predicted_as_the_same_experiment_is(predicted, dtype) -> None:
    loop = Loop(dtype)
    chosen, why = compare(loop.model, loop.draw(), **HERE)
    own = make_experiment(method=chosen, dtype="bfloat16" if dtype else "float32", **FIELDS, **HERE)
    expected = estimate(own, lambda _: None).time.predicted_step_s.median

    step_s, fits = predicted[chosen]
    assert step_s == pytest.approx(expected, rel=0.05)  # the mean of labels is another operator
    assert fits
    assert step_s == min(one for one, _ in predicted.values())
    assert f"{chosen} {1e3 * step_s:.1f} ms" in why


def test_the_model_and_all_generators_stay_as_they_were() -> None:
    loop = Loop()
    loop.model.register_forward_hook(lambda *_: None)
    first = loop.draw()
    before = {
        name: (id(one), one.clone()) for name, one in loop.model.state_dict(keep_vars=True).items()
    }
    attributes = [dict(vars(one)) for one in loop.model.modules()]
    drawn = torch.random.get_rng_state()
    compare(loop.model, first, **HERE)

    after = loop.model.state_dict(keep_vars=True)
    assert {name: id(one) for name, one in after.items()} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())
    assert [dict(vars(one)) for one in loop.model.modules()] == attributes
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert is_clear(loop.model)


FOUND = {
    "the faster one": ({"flash-bk": (2.0, True), "flash": (1.0, True)}, "flash"),
    "the one that fits": ({"flash-bk": (1.0, False), "flash": (2.0, True)}, "flash"),
    "the smaller one where none fits": ({"flash-bk": (1.0, False), "flash": (2.0, False)}, "flash"),
    "flash-bk": ({"flash-bk": (1.0, True), "flash": (2.0, False)}, "flash-bk"),
}


@pytest.mark.parametrize("case", FOUND)
def test_it_takes_the_faster_one_that_fits(case, monkeypatch) -> None:
    found, expected = FOUND[case]
    monkeypatch.setattr(automatic, "_predict", lambda _, fields: found[fields["method"]])

    assert (
        compare(nn.Linear(1, 1), FirstBatch(torch.sum, [torch.ones(1)], 1), **HERE)[0] == expected
    )


def ask_elements(x):
    return x * float(x.sum())


REASONS = {
    "elements": (
        FirstBatch(ask_elements, [torch.ones(2, 1)], 2),
        "cannot be traced (UnsupportedErr",
    ),
    "a list": (FirstBatch(ask_elements, [["a", "b"]], 2), "a batch has other parts than tensors"),
    "a mean": (FirstBatch(torch.mean, [torch.ones(2, 1)], 2), "return one loss for each sample"),
    "time": (FirstBatch(torch.sum, [torch.ones(2)], 2), "a prediction takes more than 0 s"),
    "no losses": (None, "without losses_of there is no step to trace"),
}


@pytest.mark.parametrize("case", REASONS)
def test_where_nothing_is_predicted_the_default_is_taken_and_the_reason_logged(
    case, monkeypatch, caplog
) -> None:
    first, why = REASONS[case]
    model = nn.Linear(1, 1)
    monkeypatch.setattr(automatic, "_find_gpu", lambda _: (L4, "NVIDIA L4", 2**30))
    if case == "time":
        monkeypatch.setattr(automatic, "MOST_S", 0)
        first = FirstBatch(lambda x: model(x[:, None])[:, 0], first.batch, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with caplog.at_level(logging.INFO, "dpprof"):
        chosen = choose_method(model, optimizer, None if first is None else lambda: first, B)

    assert chosen == "flash-bk"
    [line] = caplog.messages
    assert line.startswith("method flash-bk: the default, since ")
    assert why in line


def test_on_a_processor_no_batch_is_drawn(caplog) -> None:
    model = nn.Linear(1, 1)
    with caplog.at_level(logging.INFO, "dpprof"):
        chosen = choose_method(model, torch.optim.SGD(model.parameters()), pytest.fail, B)

    assert chosen == "flash-bk"
    assert "steps on cpu are not predicted" in caplog.text
