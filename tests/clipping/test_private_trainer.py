"""``PrivateTrainer``: gradients of one sample at a time; runs that resume to the same bits."""

import math
import shutil
import tempfile
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from documents import TRAINERS, find_code
from one_call import seeded
from opacus.accountants import RDPAccountant
from simulated_graphs import simulated_graphs
from small_models import TINY, one_by_one
from snapshots import assert_sentences, refusals_of
from torch import Tensor, nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from dpprof.private import (  # noqa: E402 (it needs transformers)
    PrivacyArguments,
    PrivateTrainer,
    UnsupportedError,
    WrongTrainingError,
)
from dpprof.private.accounting.budget import find_noise  # noqa: E402
from dpprof.private.accounting.schedule import Sampling  # noqa: E402
from dpprof.private.loop.private_trainer import PrivateTrainerMixin  # noqa: E402
from dpprof.private.loop.trainer_losses import read_losses  # noqa: E402
from dpprof.private.noise.noise_keys import make_generator  # noqa: E402

SAMPLES, T, V, BOUND = 12, 6, 17, 0.3
SIZES = TINY | {"vocab_size": V, "pad_token_id": 0}
NAMES = ("input_ids", "labels", "attention_mask")
CHOSEN = torch.rand(SAMPLES, generator=make_generator(seeded(1))) < 0.5
"""The samples of the first step."""

in_full = partial(pytest.param, marks=pytest.mark.slow)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "llama, LoRA":
        peft = pytest.importorskip("peft")
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return model
    if kind == "llama, QLoRA":
        return load_qlora()
    if kind.startswith("bert"):
        drops = {} if kind == "bert, dropping" else NO_DROPOUT
        config = transformers.BertConfig(**SIZES, **drops, num_labels=3)
        return transformers.BertForSequenceClassification(config)
    if kind == "masked":
        return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT))
    sizes = {"vocab_size": V, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, **ids, dropout_rate=0.0)
    )


def load_qlora() -> nn.Module:
    """Load a model in 4 bits and add adapters, as users of QLoRA do."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(**SIZES)
    in_4_bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=in_4_bits, device_map="cpu"
        )
    model = peft.prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    settings = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, settings)


def draw(kind: str) -> list[dict[str, Tensor]]:
    generator = seeded(4)
    ids = torch.randint(1, V, (SAMPLES, T), generator=generator)
    labels = ids.clone()
    labels[::2, :3] = -100
    if kind == "bert":
        labels = torch.randint(3, (SAMPLES,), generator=generator)
    mask = torch.ones_like(ids)
    rows = zip(ids, labels, mask, strict=True)
    return [{"input_ids": i, "labels": y, "attention_mask": m} for i, y, m in rows]


def one_loss(model: nn.Module, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The loss that transformers computes of one sample, which is its own mean."""
    return model(input_ids=ids, labels=labels, attention_mask=mask).loss


def make(kind: str, folder, *, model: nn.Module | None = None, **options) -> PrivateTrainer:
    given = {"max_grad_norm": BOUND, "noise_multiplier": 0.0}
    given |= {"sampling_generator": seeded(1)}
    given |= {"noise_generator": seeded(2)}
    given |= options.pop("privacy", {})
    own = {name: options.pop(name, None) for name in ("losses_of", "data_collator")}
    data, kind_of_trainer = options.pop("data", None), options.pop("trainer", PrivateTrainer)
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 1}
    settings |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    settings |= {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    settings |= {"output_dir": str(folder), "use_cpu": True, "report_to": []}
    return kind_of_trainer(
        model=build(kind) if model is None else model,
        args=transformers.TrainingArguments(**settings | options),
        train_dataset=draw(kind) if data is None else data,
        privacy=PrivacyArguments(**given),
        **own,
    )


def of_first_step(kind: str, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the trained weights, and the clipped sum of the samples that are drawn first."""
    rows = draw(kind)
    batch = [torch.stack([row[name] for row in rows])[CHOSEN] for name in NAMES]
    _, total, _ = one_by_one(lambda *one: one_loss(model, *one), model, batch, bound=BOUND)
    return trained(model), total


def stack(count: int) -> dict[str, Tensor]:
    """Return the first samples of tokens as a batch."""
    rows = draw("llama")[:count]
    return {name: torch.stack([row[name] for row in rows]) for name in NAMES}


def trained(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad])


def test_numbers_that_are_given_do_not_follow_from_the_samples(tmp_path) -> None:
    given = {"samples": 30, "expected_batch_size": 5, "delta": 1e-2, "noise_multiplier": 0.0}
    both = [make("bert", tmp_path, privacy=given, data=draw("bert")[:n]) for n in (12, 11)]
    for trainer in both:
        trainer.train()

    first, second = (one.get_train_dataloader().loader for one in both)
    assert (first.numbers, len(first)) == (second.numbers, len(second))
    assert [one.private_optimizer.expected_batch_size for one in both] == [5, 5]
    assert "probability 0.166667" in both[0].guarantee
    assert "number of steps were given: this holds if none was computed" in both[0].guarantee
    assert both[0].state.log_history[0]["epsilon"] == math.inf  # without noise


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("llama, LoRA", "kept"),
        *((kind, "logits") for kind in ("llama, QLoRA", "bert", "t5")),
        *(in_full(kind, "logits") for kind in ("llama, LoRA", "masked")),
    ],
)
def test_a_step_in_parts_sums_the_clipped_gradients_of_single_samples(kind, head, tmp_path) -> None:
    model = build(kind)
    before, expected = of_first_step(kind, model)
    trainer = make(kind, tmp_path, model=model, privacy={"head": head})
    trainer.train()

    assert CHOSEN.sum() > 3  # two parts or more
    found = (before - trained(model)) * (SAMPLES / 2)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert trainer.private_optimizer.steps == 1


def some_padded(rows) -> list[dict[str, Tensor]]:
    """Pad every third sample on the right, so that masks of batches are full, or are not."""
    for row in rows[::3]:
        row["attention_mask"] = torch.tensor([1] * (T - 2) + [0] * 2)
        if row["labels"].dim():
            row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, -100)
    return rows


@pytest.mark.parametrize(
    "kind",
    [
        "llama, LoRA",
        *(in_full(kind) for kind in ("llama, QLoRA", "masked", "bert", "t5")),
    ],
)
def test_models_of_transformers_are_captured(kind, tmp_path, monkeypatch) -> None:
    """Which masks they make they read in Python: a batch with another answer is another one."""
    options = {"max_steps": 8, "learning_rate": 0.1, "data": some_padded(draw(kind))}
    with simulated_graphs(monkeypatch):
        auto, eager = (
            make(kind, tmp_path, privacy={"execution": execution}, **options)
            for execution in ("auto", "eager")
        )
        auto.train()
        eager.train()
        assert auto.private_optimizer.captured.state_dict()["replayed"] > 3
    assert eager.private_optimizer.captured is None
    torch.testing.assert_close(trained(auto.model), trained(eager.model), rtol=1e-4, atol=1e-6)


def test_float16_with_a_fixed_scale_trains_what_the_definition_says(tmp_path) -> None:
    """Within the rounding of 11 bits; the losses of all samples are those of float32."""
    model = build("bert")
    before, expected = of_first_step("bert", model)
    make("bert", tmp_path, model=model, privacy={"loss_scale": 65536.0}).train()
    found = (before - trained(model)) * (SAMPLES / 2)
    assert 0 < (found - expected).norm() <= 0.01 * expected.norm()


def pad(rows) -> dict[str, Tensor]:
    """Collate rows of any length, as collators for supervised fine-tuning do."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: nn.utils.rnn.pad_sequence([r[name] for r in rows], True, value)
        for name, value in fill.items()
    }


@pytest.mark.parametrize("clipping", ["flat", "normalised"])
def test_padded_samples_stay_apart(clipping, tmp_path) -> None:
    kind, gamma = "llama, LoRA", 0.05
    model = build(kind)
    rows = [{n: x[: 3 + at % 4] for n, x in row.items()} for at, row in enumerate(draw(kind))]
    before, expected = trained(model), 0
    for row in (row for row, chosen in zip(rows, CHOSEN, strict=True) if chosen):
        sample = [row[name][None] for name in NAMES]
        if (sample[1][:, 1:] == -100).all():
            continue
        (norm,), own, _ = one_by_one(lambda *one: one_loss(model, *one), model, sample, math.inf)
        divisor = norm + gamma if clipping == "normalised" else max(norm + 1e-6, BOUND)
        expected = expected + own * BOUND / divisor
    privacy = {"clipping": clipping, "stability": gamma if clipping == "normalised" else None}
    options = {"model": model, "data": rows, "data_collator": pad}
    trainer = make(kind, tmp_path, **options, privacy=privacy | {"log_private": True})
    trainer.train()

    found = (before - trained(model)) * (SAMPLES / 2)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert ("clipped_share" in trainer.state.log_history[0]) == (clipping == "flat")


PACKED = {
    "a row that joins samples": (
        lambda rows: {n: torch.cat([r[n] for r in rows])[None] for n in rows[0]},
        r"losses of 4 samples have shape \(1,\), .* collate_fn packs samples",
    ),
    "positions that begin again": (
        lambda rows: pad(rows) | {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * len(rows))},
        "position_ids begin again within a row of packed samples",
    ),
    "lengths": (
        lambda rows: pad(rows) | {"seq_lengths": torch.tensor([[3, 3]] * len(rows))},
        "seq_lengths is of packed samples; give each sample a row of its own",
    ),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_samples_are_refused(case, tmp_path) -> None:
    collate, message = PACKED[case]
    options = {"per_device_train_batch_size": 6, "data_collator": collate}
    with pytest.raises((ValueError, WrongTrainingError), match=message):
        make("llama, LoRA", tmp_path, **options).train()


@pytest.mark.parametrize("left", [False, True])
def test_positions_of_padded_samples_are_not_taken_for_packed_ones(left, tmp_path) -> None:
    trainer, batch = make("llama, LoRA", tmp_path), stack(2)
    batch["attention_mask"][0, slice(0, 2) if left else slice(4, None)] = 0
    positions = (batch["attention_mask"].cumsum(1) - 1).masked_fill(batch["attention_mask"] == 0, 1)
    assert len(trainer.compute_sample_losses(trainer.model, batch | {"position_ids": positions}))


def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path) -> None:
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    options["privacy"] = {"noise_multiplier": 1.0, "delta": 1e-2, "accountant": "rdp"}
    options["privacy"] |= {"resume": "exact"}
    options |= {"learning_rate": 0.01, "lr_scheduler_type": "linear"}
    whole = make("bert", tmp_path, model=build("bert, dropping"), **options)
    whole.train()
    for stopped in (1, 4):  # within an epoch of two steps, and between two
        options["model"] = build("bert, dropping")
        again = make("bert", tmp_path / "again", **options | {"save_strategy": "no"})
        again.privacy.noise_generator.manual_seed(8)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stopped}"))

        assert torch.equal(trained(again.model), trained(whole.model))
        assert again.spent.history == whole.spent.history == [(1.0, 0.5, 5)]
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.5, 5)]
    assert whole.spent.epsilon() == pytest.approx(accountant.get_epsilon(delta=1e-2), rel=1e-12)


def test_a_schedule_steps_once_for_each_batch(tmp_path) -> None:
    options = {"max_steps": 12, "learning_rate": 0.12, "lr_scheduler_type": "linear"}
    trainer = make("bert", tmp_path, per_device_train_batch_size=1, **options)
    rates = []

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            inner = trainer.private_optimizer.original_optimizer
            inner.register_step_pre_hook(lambda one, *_: rates.append(one.param_groups[0]["lr"]))

    trainer.add_callback(Watch())
    trainer.train()

    assert trainer._clipping.batches > 12 == trainer.private_optimizer.steps
    assert rates == pytest.approx([0.12 - 0.01 * at for at in range(12)])


def test_a_budget_is_kept_and_logged(tmp_path) -> None:
    budget = {"noise_multiplier": None, "epsilon": 4.0, "delta": 1e-2, "accountant": "rdp"}
    budget["log_private"] = True
    trainer = make("bert", tmp_path, max_steps=4, privacy=budget)
    trainer.train()
    logged = [one for one in trainer.state.log_history if "loss" in one]

    assert 3.9 < trainer.spent.epsilon() <= 4.0
    epsilons = [one["epsilon"] for one in logged if "epsilon" in one]  # as often as it is cheap
    assert epsilons == sorted(epsilons)
    assert "epsilon" in logged[0]
    assert logged[-1]["epsilon"] == pytest.approx(trainer.spent.epsilon(), abs=1e-4)
    assert all(0 <= one["clipped_share"] <= 1 for one in logged if "clipped_share" in one)
    assert any(one["sample_norm_50%"] > 0 for one in logged if "sample_norm_50%" in one)


def test_evaluation_and_bfloat16_run_as_usual(tmp_path) -> None:
    trainer = make("bert", tmp_path, bf16=True, max_steps=2, privacy={"noise_multiplier": 1.0})
    trainer.model.bert.embeddings.eval()  # and so it stays
    trainer.train()
    assert trainer.model.bert.encoder.training
    assert not trainer.model.bert.embeddings.training
    metrics = trainer.evaluate(draw("bert"))

    assert math.isfinite(metrics["eval_loss"])


def test_checkpointed_layers_train_the_same(tmp_path) -> None:
    weights, options = [], {"privacy": {"log_private": True}}
    for checkpointing in (False, True):
        trainer = make("llama, LoRA", tmp_path, gradient_checkpointing=checkpointing, **options)
        trainer.train()
        weights.append(trained(trainer.model))

    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)
    model = trainer.model.get_base_model()
    tokens = trainer.state.total_flos / 6 / model.num_parameters(exclude_embeddings=True)
    assert tokens == T * CHOSEN.sum()


def test_losses_of_ones_own_that_mix_samples_are_found_by_the_check(tmp_path) -> None:
    def losses_of(model, inputs) -> Tensor:
        losses = model(input_ids=inputs["input_ids"]).logits.square().mean(1)
        return losses / (inputs["input_ids"] > 3).sum()

    with pytest.raises(WrongTrainingError, match="in the batch is 1/2 of its loss alone"):
        make("bert", tmp_path, losses_of=losses_of).train()
    make("bert", tmp_path, losses_of=losses_of, privacy={"check": False}).train()


def test_losses_of_ones_own_that_draw_and_inputs_with_words_are_checked(tmp_path) -> None:
    seen = []

    def losses_of(model, inputs) -> Tensor:
        seen.append(inputs["words"])
        logits = model(input_ids=inputs["ids"]["own"]).logits
        return (logits + torch.randn_like(logits)).square().mean(1)

    def collate(records):
        ids = torch.stack([one["input_ids"] for one in records])
        return {"ids": {"own": ids}, "words": [str(one) for one in ids.sum(1).tolist()]}

    options = {"data_collator": collate, "remove_unused_columns": False}
    make("bert", tmp_path, losses_of=losses_of, **options).train()
    assert [len(words) for words in seen[:4]] == [2, 2, 1, 1]  # the batch, and each sample alone

    def centred(model, inputs) -> Tensor:
        losses = losses_of(model, inputs)
        return losses - losses.mean()

    with pytest.raises(WrongTrainingError, match="the model or the loss mixes samples"):
        make("bert", tmp_path, losses_of=centred, **options).train()


def of_many_lengths() -> list[dict[str, Tensor]]:
    rows = zip(draw("llama"), (2, 6, 4, 3) * 3, strict=True)
    return [{name: one[name][:length] for name in one} for one, length in rows]


def cut_and_mix(records) -> dict[str, Tensor]:
    """Give some samples the tokens of another."""
    batch = pad(records)
    order = torch.randperm(len(records))
    batch["input_ids"][:, :2] = batch["input_ids"][order, :2]
    return batch


def mean_over_padding(model, inputs) -> Tensor:
    return model(input_ids=inputs["input_ids"]).logits.square().mean((1, 2))


def build_long(kind: str = "longrope") -> nn.Module:
    torch.manual_seed(0)
    rope = {"rope_type": kind, "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]}
    rope |= {"original_max_position_embeddings": 4, "factor": 2.0, "rope_theta": 1e4}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=rope)
    return transformers.LlamaForCausalLM(config)


def test_losses_that_depend_on_other_samples_are_refused(tmp_path) -> None:
    options = {"data": of_many_lengths(), "data_collator": pad, "remove_unused_columns": False}
    make("llama", tmp_path, model=build_long("default"), **options).train()
    with pytest.raises(UnsupportedError, match="positions of rope_type 'longrope'"):
        make("llama", tmp_path, model=build_long(), **options)
    for other in ({"losses_of": mean_over_padding}, {"data_collator": cut_and_mix}):
        model = build_long("default")
        with pytest.raises(WrongTrainingError, match=r"length to which a batch|collate_fn gives a"):
            make("llama", tmp_path, model=model, **options | other).train()


@pytest.mark.parametrize("kind", ["masked", "llama, LoRA"])
def test_verifying_at_every_step_changes_no_bits(kind, tmp_path) -> None:
    words = {f"w{at}": at for at in range(V - 2)} | {"[PAD]": V - 2, "[MASK]": V - 1}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    data, weights = [{"input_ids": one["input_ids"]} for one in of_many_lengths()], []
    for every in (None, 1):
        torch.manual_seed(0)
        collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=kind == "masked")
        privacy = {"verify_every": every, "noise_multiplier": 1.0}
        options = {"privacy": privacy, "data_collator": collate, "max_steps": 3}
        trainer = make(kind, tmp_path, data=data, **options)
        trainer.train()
        weights.append(trained(trainer.model))
    assert torch.equal(*weights)


class OwnLoss(PrivateTrainer):
    def compute_loss(self, *inputs, **named):
        return super().compute_loss(*inputs, **named)


class OwnStep(transformers.Trainer):
    def training_step(self, *inputs, **named):
        return super().training_step(*inputs, **named)


class PrivateOwnStep(PrivateTrainerMixin, OwnStep):
    pass


class OwnLoader(PrivateTrainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


class OwnTrainer(transformers.Trainer):
    """A trainer of a user's own, with a loss of its own."""

    scale = 1.0

    def compute_loss(self, *inputs, **named):
        return self.scale * super().compute_loss(*inputs, **named)


class PrivateOwn(PrivateTrainerMixin, OwnTrainer):
    pass


@pytest.mark.parametrize("scale", [1.0, 1.1])
def test_a_trainer_of_ones_own_is_private_if_its_loss_is_what_is_clipped(scale, tmp_path) -> None:
    model = build("llama, LoRA")
    before, expected = of_first_step("llama, LoRA", model)
    trainer = make("llama, LoRA", tmp_path, model=model, trainer=PrivateOwn)
    trainer.scale = scale
    told = pytest.raises(ValueError, match="or compute_loss of PrivateOwn does; give it losses_of")
    with nullcontext() if scale == 1 else told:
        trainer.train()
        found = (before - trained(model)) * (SAMPLES / 2)
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_the_trainer_of_the_page_trains_as_it_stands(tmp_path) -> None:
    names = {"model": build("bert"), "dataset": 12 * draw("bert"), "output_dir": str(tmp_path)}
    before = trained(names["model"])
    exec(find_code(TRAINERS, "PrivateTrainer("), names)  # noqa: S102
    assert names["trainer"].private_optimizer.steps == 6
    assert names["trainer"].spent.epsilon() <= 3.0
    assert not torch.equal(trained(names["model"]), before)


class Masked(transformers.GPT2LMHeadModel):
    """A causal model by another name, whose loss is another one if asked."""

    scale = 1.0

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        output = super().forward(input_ids, attention_mask=attention_mask, labels=labels)
        if output.loss is not None:
            output.loss = self.scale * output.loss
        return output


@pytest.mark.parametrize("scale", [1.0, 1.1])
def test_losses_are_the_models_own_or_refused(scale, tmp_path) -> None:
    sizes = {"vocab_size": V, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": T}
    model = Masked(transformers.GPT2Config(**sizes, pad_token_id=0))
    model.scale = scale
    told = pytest.raises(ValueError, match="Masked computes its loss otherwise than as the cross")
    with nullcontext() if scale == 1 else told:
        make("masked", tmp_path, model=model).train()


def pad_left(rows):
    """Collate rows of different lengths, whose first tokens are padding."""
    ids = [row["input_ids"] for row in rows]
    longest = max(map(len, ids))
    padded = [functional.pad(own, (longest - len(own), 0)) for own in ids]
    mask = [functional.pad(torch.ones_like(own), (longest - len(own), 0)) for own in ids]
    batch = {"input_ids": torch.stack(padded), "attention_mask": torch.stack(mask)}
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[range(len(ids)), [longest - len(own) for own in ids]] = -100  # padding predicts it
    return batch | {"labels": labels}


def test_padding_on_the_left_is_refused_where_positions_follow_it(tmp_path) -> None:
    sizes = {"vocab_size": V, "hidden_size": 8, "n_layer": 1, "n_head": 2}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes, **dropout))
    gpt = {"vocab_size": V, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": T}
    absolute = Masked(transformers.GPT2Config(**gpt, pad_token_id=0))
    rows = enumerate(draw("llama, LoRA"))
    data = [{"input_ids": row["input_ids"][: 2 + at % (T - 1)]} for at, row in rows]
    options = {"data_collator": pad_left, "data": data}
    assert make("masked", tmp_path, model=bloom, **options).train()
    with pytest.raises(WrongTrainingError, match="padding on the left without position_ids"):
        make("masked", tmp_path, model=absolute, **options).train()
    for model in (bloom, absolute):
        unchecked = make("masked", tmp_path, model=model, privacy={"check": False}, **options)
        with pytest.raises(ValueError, match="attention_mask begins with padding"):
            unchecked.train()


class Disturbing(transformers.TrainerCallback):
    """Asks for the loader after each step, and saves before the second one if asked."""

    def __init__(self, *, saves: bool) -> None:
        self.saves, self.trainer = saves, None

    def on_step_begin(self, *given, **_):
        if self.saves and given[1].global_step == 1:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def on_step_end(self, *_, **__):
        assert len(self.trainer.get_train_dataloader()) == 2


def test_callbacks_do_not_part_the_noise_from_its_samples(tmp_path) -> None:
    def disturb(*, saves: bool) -> PrivateTrainer:
        trainer = make("bert", tmp_path, max_steps=3)
        trainer.add_callback(watch := Disturbing(saves=saves))
        watch.trainer = trainer
        return trainer

    trainers = make("bert", tmp_path, max_steps=3), disturb(saves=False)
    for trainer in trainers:
        trainer.train()
    assert torch.equal(*(trained(trainer.model) for trainer in trainers))
    with pytest.raises(RuntimeError, match="saved after a step alone, and here a batch was drawn"):
        disturb(saves=True).train()


def test_a_trainer_trains_once_and_leaves_a_plain_model(tmp_path) -> None:
    trainer = make("bert", tmp_path)
    with pytest.raises(RuntimeError, match=r"nothing is private yet: train\(\) makes"):
        _ = trainer.guarantee
    trainer.train()
    assert trainer.model(input_ids=draw("bert")[0]["input_ids"][None]).logits.requires_grad
    with pytest.raises(RuntimeError, match="this PrivateTrainer trained before"):
        trainer.train()
    again = make("bert", tmp_path, model=trainer.model)
    again.train()


def test_arguments_stay_as_they_were_given(tmp_path) -> None:
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), gradient_accumulation_steps=3, use_cpu=True, report_to=[]
    )
    privacy = PrivacyArguments(max_grad_norm=1.0, noise_multiplier=1.0)
    PrivateTrainer(build("bert"), args, train_dataset=draw("bert"), privacy=privacy)
    assert args.gradient_accumulation_steps == 3


def test_label_smoothing_reaches_a_head_without_logits(tmp_path) -> None:
    losses = []
    for head in ("logits", "kept"):
        trainer = make("llama, LoRA", tmp_path, label_smoothing_factor=0.2, privacy={"head": head})
        losses.append(trainer.compute_sample_losses(trainer.model.eval(), stack(3)).detach())
    torch.testing.assert_close(*losses)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint of a run of one step."""
    folder = tmp_path_factory.mktemp("saved")
    make("bert", folder, save_strategy="steps", save_steps=1).train()
    return folder / "checkpoint-1"


@pytest.mark.parametrize("lost", ["private.pt", "optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_that_is_not_whole_is_refused(lost, saved, tmp_path) -> None:
    """Such as one of another Trainer, or of a run that was killed while it saved."""
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(saved, checkpoint, ignore=shutil.ignore_patterns(lost))
    with pytest.raises(ValueError, match=rf"checkpoint-1 has no {lost}: it was saved by another"):
        make("bert", tmp_path, max_steps=2).train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_of_two_runs_is_refused(saved, tmp_path) -> None:
    checkpoint = shutil.copytree(saved, tmp_path / "checkpoint-1")
    state = checkpoint / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 1', '"global_step": 0'))
    with pytest.raises(ValueError, match=r"of 1 private steps, and its trainer_state\.json of 0"):
        make("bert", tmp_path, max_steps=2).train(resume_from_checkpoint=str(checkpoint))


NOT_CALLED = {
    "compute_loss": OwnLoss,
    "training_step": PrivateOwnStep,
    "get_train_dataloader": OwnLoader,
}


@pytest.mark.parametrize("name", NOT_CALLED)
def test_what_training_would_not_call_is_refused(name, tmp_path) -> None:
    with pytest.raises(ValueError, match=f"{name} is not allowed in private training"):
        make("bert", tmp_path, trainer=NOT_CALLED[name])


def test_what_makes_the_guarantee_false_is_refused_by_name(tmp_path) -> None:
    def train(**options) -> None:
        make("bert", tmp_path, **options).train()

    assert_sentences("clipping/trainer", refusals_of(train, ValueError, ImportError))


def test_a_sample_without_labels_has_the_loss_zero() -> None:
    labels, logits = torch.tensor([[-100, -100, -100], [1, 0, 2]]), torch.randn(2, 3, 4)
    losses = read_losses(logits, labels, shifts=False, smoothing=0.1)
    assert losses[0] == 0
    expected = functional.cross_entropy(logits[1], labels[1], label_smoothing=0.1)
    torch.testing.assert_close(losses[1], expected)


def test_labels_that_are_no_ids_are_refused() -> None:
    for outputs, labels in ((4, torch.randn(2)), (1, torch.zeros(2, dtype=torch.int64))):
        with pytest.raises(ValueError, match="labels must be ids of shape"):
            read_losses(torch.randn(2, outputs), labels, shifts=False)


def test_cyclic_and_truncated_steps_are_counted_drawn_and_resumed(tmp_path) -> None:
    options = {"max_steps": 7, "gradient_accumulation_steps": 1, "save_strategy": "steps"}
    options |= {"save_steps": 5, "per_device_train_batch_size": 2}
    privacy = {"folds": 3, "truncated_batch_size": 2, "delta": 1e-2, "accountant": "rdp"}
    privacy |= {"noise_multiplier": 1.0, "resume": "exact"}
    drawn = []

    class Watched(PrivateTrainer):
        def training_step(self, model, inputs, *given):
            drawn.append([(part.size, part.fold, part.is_last) for _, part in inputs["parts"]])
            return super().training_step(model, inputs, *given)

    whole = make("bert", tmp_path, trainer=Watched, privacy=privacy, **options)
    whole.train()
    first = list(drawn)
    drawn.clear()
    again = make("bert", tmp_path, trainer=Watched, privacy=privacy, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))

    assert all(len(parts) == 1 and parts[0][0] <= 2 and parts[0][2] for parts in first)
    assert [parts[0][1] for parts in first] == [0, 1, 2, 0, 1, 2, 0]
    assert drawn == first[5:]
    assert torch.equal(trained(again.model), trained(whole.model))
    assert again.spent.history == whole.spent.history == [(1.0, 0.5, 3)]
    assert again.spent.sampling == whole.spent.sampling == (0.5, 3, 2, 4, "sample")
    assert again.spent.epsilon() == whole.spent.epsilon() > 0
    assert "Of more than 2 so many are kept, at random" in whole.guarantee


@pytest.mark.parametrize(
    ("noise", "history"),
    [("banded", (0.5, 2)), in_full("bisr", (1.0, 1))],
)
def test_correlated_noise_is_counted_and_resumed(noise, history, tmp_path) -> None:
    options = {"max_steps": 6, "gradient_accumulation_steps": 1, "save_strategy": "steps"}
    options |= {"save_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 0.1}
    privacy = {"folds": 3, "noise": noise, "bands": 3, "epsilon": 8.0, "delta": 1e-2}
    privacy |= {"noise_multiplier": None, "accountant": "rdp", "resume": "exact"}
    whole = make("bert", tmp_path, privacy=privacy, **options)
    whole.train()
    again = make("bert", tmp_path, privacy=privacy, **options)
    again.privacy.noise_generator.manual_seed(8)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    rate, turns = history
    found = find_noise(8.0, 1e-2, turns, Sampling(rate), "rdp")
    assert whole.spent.history == again.spent.history == [(found, rate, turns)]
    assert whole.spent.epsilon() <= 8
    assert torch.equal(trained(again.model), trained(whole.model))
    assert f"correlated Gaussian noise ({noise} of 3 bands, 6 steps and 3 folds" in whole.guarantee


def test_the_bound_follows_a_quantile_and_both_are_counted(tmp_path) -> None:
    privacy = {"noise_multiplier": 0.5, "bound_quantile": 0.5, "delta": 1e-2, "accountant": "rdp"}
    trainer = make("bert", tmp_path, privacy=privacy, max_steps=4)
    trainer.train()

    [(noise, rate, steps)] = trainer.spent.history
    assert (noise, rate, steps) == (pytest.approx(0.5), 0.5, 4)
    assert trainer.private_optimizer.noise_multiplier > 0.5
    assert trainer.private_optimizer.max_grad_norm != BOUND
    assert "The bound moves after each step" in trainer.guarantee


def test_the_second_moment_is_corrected(tmp_path) -> None:
    options = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 0.01}
    both = []
    for floor in (None, 1e-3):
        trainer = make(
            "bert",
            tmp_path,
            privacy={"noise_multiplier": 1.0, "second_moment_floor": floor},
            **options,
        )
        trainer.train()
        both.append(trainer)
    states = [next(iter(one.private_optimizer.state.values())) for one in both]
    variance = (BOUND / 6) ** 2 * (1 - 0.999**4)

    assert not torch.equal(*(trained(one.model) for one in both))
    assert "noise_variance" not in states[0]
    assert states[1]["noise_variance"] == pytest.approx(variance)
