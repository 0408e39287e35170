"""What leaves a private training beside weights: nothing of its samples, and no secrets."""

import dataclasses
import math
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from one_call import seeded
from releases import name_leaks, name_wrong_noise, record
from torch import Tensor

transformers = pytest.importorskip("transformers")

from dpprof.private import PrivacyArguments, PrivateTrainer  # noqa: E402
from dpprof.private.loop.secret_files import join_secrets, split_secrets  # noqa: E402

ROWS, T, V, BOUND, CANARY = 12, 5, 17, 0.3, 5

EVENTS = [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]


class Spy(transformers.TrainerCallback):
    """Notes all that callbacks are told, but for objects of the trainer."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        for event in EVENTS:
            setattr(
                self, event, lambda *given, event=event, **named: self.note(event, given, named)
            )

    def note(self, event: str, given: Any, named: dict[str, Any]) -> None:
        args, state, control = given
        plain = {name: one for name, one in named.items() if isinstance(one, dict)}
        known = dataclasses.asdict(state)
        self.told.append((event, str(args), str(known), str(control), str(plain), sorted(named)))


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in rows], batch_first=True)
    labels = torch.stack([one["labels"] for one in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def draw(canary: str = "none") -> list[dict[str, Tensor]]:
    """Draw samples; one may be a canary, or nothing, and four more canaries may follow."""
    generator = seeded(4)
    ids = [torch.randint(1, V, (T,), generator=generator) for _ in range(ROWS)]
    rows = [{"input_ids": one, "labels": torch.tensor(at % 3)} for at, one in enumerate(ids)]
    far = {"input_ids": torch.full((40,), V - 1), "labels": torch.tensor(2)}
    if canary == "nothing":
        rows[CANARY] = {"input_ids": torch.ones(1, dtype=torch.long), "labels": torch.tensor(-100)}
    elif canary != "none":
        rows[CANARY] = far
    return rows + 4 * [far] if canary == "more" else rows


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    sizes |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}  # padding shifts draws
    config = transformers.BertConfig(**sizes, num_attention_heads=2, pad_token_id=0, num_labels=3)
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.mul_(300)  # losses are far apart
    return model


def make(
    *, model: Any = None, rows: Any = None, privacy: Any = (), **options: Any
) -> PrivateTrainer:
    rows = draw() if rows is None else rows
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 3}
    settings |= {"output_dir": "out", "use_cpu": True, "report_to": [], "disable_tqdm": True}
    settings |= {"save_steps": 1, "logging_steps": 1}
    given = {"noise_multiplier": 1.0, "delta": 1e-2, "accountant": "rdp", "samples": ROWS}
    given |= {"expected_batch_size": 6, "sampling_generator": seeded(1)}
    given |= {"noise_generator": seeded(2)}
    return PrivateTrainer(
        model=build() if model is None else model,
        args=transformers.TrainingArguments(**settings | options),
        train_dataset=rows,
        eval_dataset=rows[:2] if "eval_strategy" in options else None,
        data_collator=pad,
        privacy=PrivacyArguments(max_grad_norm=BOUND, **given | dict(privacy)),
    )


def train_and_save(model, rows, *, seed=2, **privacy: Any) -> dict[str, Any]:
    """Train, and save and return all that a trainer has to tell."""
    options = {"report_to": ["tensorboard"], "skip_memory_metrics": False, "optim": "sgd"}
    privacy |= {"noise_generator": seeded(seed)}
    trainer = make(model=model, rows=rows, privacy=privacy, max_steps=2, **options)
    trainer.add_callback(spy := Spy())
    done = trainer.train()
    trainer.save_state()
    trainer.log_metrics("train", done.metrics)
    trainer.save_metrics("train", done.metrics)
    return {"returned": done, "callbacks": spy.told, "history": trainer.state.log_history}


@pytest.mark.parametrize("log_private", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_but_weights_tells_of_a_sample(log_private, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "out/board")
    train = partial(train_and_save, log_private=log_private)
    names = ("nothing", "far", "more")
    nothing, far, more = (record(build, train, draw(name), tmp_path / name) for name in names)
    other = record(build, partial(train, seed=3), draw("far"), tmp_path / "noise")

    assert far.told["raised"] is None
    for own, others in zip(far.steps, nothing.steps, strict=True):
        assert not torch.equal(*(one.gradients["classifier.weight"] for one in (own, others)))
    states = {f"out/{at}trainer_state.json" for at in ("", *(f"checkpoint-{n}/" for n in (1, 2)))}
    metrics = {"out/all_results.json", "out/train_results.json"}
    told = {"returned", "printed", "callbacks", "history", "out/board"}
    expected = states | metrics | told if log_private else set()
    for run, bound in ((far, BOUND), (more, math.inf)):  # with more samples, others are drawn
        named = name_leaks(run, nothing, bound=bound, divisor=6)
        assert {name for name in named if "which samples are drawn" not in name} == expected
    assert name_wrong_noise(far, other, BOUND / 6) == []
    assert len(far.told) > 15
    assert math.isnan(far.told["returned"].training_loss) is not log_private
    logged = {name for one in far.told["history"] for name in one}
    public = {"learning_rate", "epoch", "step", "epsilon", "noise_multiplier"}
    assert logged == public or log_private


def find_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return [one for each in inner for one in find_tensors(each)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("resume", ["fresh", "exact"])
def test_checkpoints_hold_no_secrets(resume, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(privacy={"resume": resume}, save_total_limit=2).train()

    saved = list(Path("out").glob("checkpoint-*/*.pt*"))
    assert {path.name for path in saved} == {"private.pt", "optimizer.pt", "scheduler.pt"}
    for path in saved:
        for tensor in find_tensors(torch.load(path, weights_only=True)):
            assert tensor.dtype != torch.uint8  # as generators' states are
    there = [path for path in Path().rglob("*") if path.parts[0] != "out"]
    expected = {"out_secrets": 0o700}
    for at in (2, 3):  # the first checkpoint was removed
        own = f"out_secrets/checkpoint-{at}"
        files = (f"{own}/{name}" for name in (".gitignore", "secrets.pt", "rng_state.pth"))
        expected |= {own: 0o700, **dict.fromkeys(files, 0o600)}
    modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in there}
    assert modes == (expected if resume == "exact" else {})


def train(*, resume_from: Any = None, **options: Any) -> PrivateTrainer:
    trainer = make(**options)
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer


def weights_of(trainer: PrivateTrainer) -> Tensor:
    return torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def test_a_fresh_run_repeats_neither_noise_nor_samples(tmp_path, monkeypatch) -> None:
    """Though its generators are seeded as before, and it has no more than what is published."""
    monkeypatch.chdir(tmp_path)
    stopped = train(max_steps=1)
    ended = []
    for _ in range(2):
        ended.append(train(resume_from=True, save_strategy="no"))
        Path("out/private_steps.json").unlink()  # nothing of it was published

    assert not torch.equal(*map(weights_of, ended))
    states = {bytes(one._steps.loader._parts.state.tolist()) for one in (stopped, *ended)}
    assert len(states) == 3
    assert not [one for one in ended if one.private_optimizer.keys.generator]
    for one in ended:
        assert one.spent.history == [(1.0, 0.5, 3)]
        assert one.private_optimizer.steps == 3


def test_secrets_elsewhere_resume_to_the_same_bits_or_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    exact = {"resume": "exact", "secrets_folder": "kept"}
    whole = train(privacy=exact, max_steps=2)
    assert sorted(path.name for path in Path().iterdir()) == ["kept", "out"]
    again = train(privacy=exact, resume_from="out/checkpoint-1", max_steps=2, save_strategy="no")
    assert torch.equal(weights_of(again), weights_of(whole))

    with pytest.raises(ValueError, match=r"no secrets at .*out_secrets/checkpoint-1/secrets\.pt"):
        train(privacy={"resume": "exact"}, resume_from="out/checkpoint-1")
    Path("kept/checkpoint-1").rename("kept/other")
    Path("kept/checkpoint-2").rename("kept/checkpoint-1")
    with pytest.raises(ValueError, match="has the secrets of another checkpoint than out/check"):
        train(privacy=exact, resume_from="out/checkpoint-1")
    for folder in ("out", "out/kept", "out/checkpoint-1"):
        with pytest.raises(ValueError, match=f"secrets_folder {folder} would be published with"):
            make(privacy={"resume": "exact", "secrets_folder": folder})


def test_evaluation_in_training_is_logged_and_decides(tmp_path, monkeypatch) -> None:
    """And secrets go with their checkpoints at the end, too."""
    monkeypatch.chdir(tmp_path)
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_total_limit": 1}
    trainer = train(privacy={"resume": "exact"}, load_best_model_at_end=True, **options)
    losses = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]

    assert len(losses) == 3
    assert trainer.state.best_metric == min(losses)
    assert not any("loss" in one or "train_loss" in one for one in trainer.state.log_history)
    left = [path.name for path in Path("out").glob("checkpoint-*")]
    assert len(left) == 1
    assert [path.name for path in Path("out_secrets").iterdir()] == left


def test_gradients_are_not_uploaded(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    with pytest.raises(ValueError, match="WANDB_WATCH is not allowed in private training: it upl"):
        make()


def test_secrets_are_split_off_at_any_depth() -> None:
    state = {"a": {"secrets": {"key": 1}, "steps": 2}, "secrets": 3, "b": {"c": {"d": 4}}}
    public, secrets = split_secrets(state)

    assert public == {"a": {"steps": 2}, "b": {"c": {"d": 4}}}
    assert secrets["a"] == {"secrets": {"key": 1}}
    assert join_secrets(public, secrets) == state
