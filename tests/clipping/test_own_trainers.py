"""``PrivateTrainer`` around what is a user's own: losses, logs, data, optimizers and runs."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

transformers = pytest.importorskip("transformers")

from clipping.test_private_trainer import (  # noqa: E402
    SAMPLES,
    SIZES,
    build,
    draw,
    make,
    of_first_step,
    trained,
)

from dpprof.private.loop.private_trainer import PrivateTrainerMixin  # noqa: E402


class Adding(transformers.Trainer):
    """Logs what it adds up, as TRL's trainers do."""

    def __init__(self, *inputs, **named):
        super().__init__(*inputs, **named)
        self.seen: list[float] = []

    def compute_loss(self, *inputs, **named):
        loss = super().compute_loss(*inputs, **named)
        self.seen.append(float(loss))
        return loss

    def log(self, logs, *inputs, **named):
        super().log({**logs, "own_loss": sum(self.seen)}, *inputs, **named)


class PrivateAdding(PrivateTrainerMixin, Adding):
    pass


def test_what_a_trainer_adds_to_its_logs_is_left_out(tmp_path) -> None:
    trainer = make("bert", tmp_path, trainer=PrivateAdding, max_steps=2)
    told: list[set[str]] = []
    spy = transformers.TrainerCallback()
    spy.on_log = lambda *_, logs, **__: told.append(set(logs))
    trainer.add_callback(spy)
    done = trainer.train()

    public = {"learning_rate", "epoch", "step", "epsilon", "noise_multiplier"}
    assert trainer.seen  # its loss was compared
    assert len(told) == 3
    for names in (*told, *map(set, trainer.state.log_history), set(done.metrics)):
        assert names <= public


class Weighted(transformers.Trainer):
    """The mean loss of a batch weighs classes; of one sample it does not show."""

    def compute_loss(self, model, inputs, *_, **__):
        labels = inputs["labels"]
        logits = model(**inputs).logits
        return functional.cross_entropy(logits, labels, logits.new_tensor([1.0, 10.0, 0.1]))


class Halved(transformers.Trainer):
    def _prepare_inputs(self, inputs):
        prepared = super()._prepare_inputs(inputs)
        return prepared | {"attention_mask": prepared["attention_mask"] * 0 + 1}


def test_weights_of_classes_are_refused(tmp_path) -> None:
    kind = type("PrivateWeighted", (PrivateTrainerMixin, Weighted), {})
    trainer = make("bert", tmp_path, trainer=kind)
    with pytest.raises(ValueError, match="each of the same weight, or compute_loss of PrivateWei"):
        trainer.train()


def test_a_trainer_prepares_inputs_as_ever(tmp_path) -> None:
    data = [row | {"attention_mask": row["attention_mask"] * 0} for row in draw("bert")]
    model = build("bert")
    before, expected = of_first_step("bert", model)
    kind = type("PrivateHalved", (PrivateTrainerMixin, Halved), {})
    make("bert", tmp_path, model=model, trainer=kind, data=data).train()
    found = (before - trained(model)) * (SAMPLES / 2)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


class Centred(torch.utils.data.Dataset):
    """Samples that a loader reads together see each other."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int):
        return self.rows[at]

    def __getitems__(self, places: list[int]):
        ids = torch.stack([self.rows[at]["input_ids"] for at in places])
        return [self.rows[at] | {"input_ids": ids.amax(0)} for at in places]


def test_samples_are_read_one_by_one(tmp_path) -> None:
    model = build("bert")
    before, expected = of_first_step("bert", model)
    make("bert", tmp_path, model=model, data=Centred(draw("bert"))).train()
    found = (before - trained(model)) * (SAMPLES / 2)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def of_dropping(folder, **privacy) -> Tensor:
    model = build("bert, dropping")
    trainer = make("bert", folder, model=model, privacy={"sample_rate": 1.0, **privacy})
    trainer.train()
    return trained(model)


def test_dropout_follows_from_no_number_that_is_published(tmp_path) -> None:
    """``Trainer`` seeds all generators with ``args.seed``, and saves it."""
    given = {"sampling_generator": None, "expected_batch_size": 12.0}
    first, second = (of_dropping(tmp_path, **given) for _ in range(2))
    assert not torch.equal(first, second)
    repeated = [of_dropping(tmp_path, expected_batch_size=12.0) for _ in range(2)]
    assert torch.equal(*repeated)  # follows from a generator that is given


def test_steps_that_were_saved_are_not_taken_again_on_other_samples(tmp_path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    make("bert", tmp_path, **options).train()
    for later in (2, 3):  # as save_total_limit does beside the best one
        shutil.rmtree(tmp_path / f"checkpoint-{later}")
    told = "3 steps of this run were saved, and .*checkpoint-1 is of 1: those between would be"
    with pytest.raises(ValueError, match=told):
        make("bert", tmp_path, **options).train(resume_from_checkpoint=True)

    Path(tmp_path, "private_steps.json").unlink()
    again = make("bert", tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    assert again.private_optimizer.steps == 3


def test_a_run_that_ended_takes_no_step_more(tmp_path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    make("bert", tmp_path, **options).train()
    again = make("bert", tmp_path, **options)
    before = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt")
    again.train(resume_from_checkpoint=True)
    assert again.private_optimizer.steps == 2
    assert again.state.global_step == 2
    assert before["param_groups"]


def test_private_counts_of_a_run_reach_no_later_checkpoint(tmp_path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 50}
    logged = {"log_private": True}
    make("bert", tmp_path, privacy=logged, max_steps=1, **options).train()
    with pytest.raises(ValueError, match="checkpoint-1 has private logs and counts, which later"):
        make("bert", tmp_path, max_steps=2, **options).train(resume_from_checkpoint=True)
    again = make("bert", tmp_path, privacy=logged, max_steps=2, **options)
    again.train(resume_from_checkpoint=True)
    assert again.private_optimizer.steps == 2


def test_trained_tokens_before_a_sample_have_no_labels(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model = peft.get_peft_model(base, settings)
    before, expected = of_first_step("llama", model)
    make("llama", tmp_path, model=model).train()
    found = (before - trained(model)) * (SAMPLES / 2)
    assert (found - expected).norm() <= 1e-3 * expected.norm()


class WithMode(torch.optim.Optimizer):
    """Refuses to step in the mode of evaluation, as optimizers without schedules do."""

    mode = "eval"

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def step(self, _=None):
        assert self.mode == "train"


def test_an_optimizer_with_a_mode_is_told_of_it(tmp_path) -> None:
    class Own(transformers.Trainer):
        def create_optimizer(self, *_):
            self.optimizer = WithMode(self.model.parameters())
            return self.optimizer

    kind = type("PrivateOwnOptimizer", (PrivateTrainerMixin, Own), {})
    trainer = make("bert", tmp_path, trainer=kind, max_steps=2)
    trainer.train()
    assert trainer.private_optimizer.steps == 2


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda trainer: next(iter(trainer.get_train_dataloader())), "drawn in training alone"),
        (lambda trainer: trainer.create_optimizer(), r"train\(\) makes the optimizer"),
    ],
)
def test_what_train_alone_can_make_says_so(ask, told, tmp_path) -> None:
    with pytest.raises(RuntimeError, match=told):
        ask(make("bert", tmp_path))
