"""TRL's trainers: gradients by definition, resumed runs, epsilon, logs, and what is refused."""

import logging
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from documents import TRAINERS, find_code
from one_call import seeded
from opacus.accountants import RDPAccountant
from simulated_graphs import simulated_graphs
from snapshots import assert_sentences, refusals_of

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

from trl_cases import (  # noqa: E402 (it needs TRL)
    BOUND,
    CHOSEN,
    SAMPLES,
    WORDS,
    adapters,
    answer_of,
    build,
    build_tokenizer,
    clipped_sum,
    completions,
    datasets,
    make,
    pairs,
    prompt_of,
    trained,
)

from dpprof.private.trl import PrivateDPOTrainer, PrivateSFTTrainer  # noqa: E402

EACH = pytest.mark.parametrize("trainer", [PrivateSFTTrainer, PrivateDPOTrainer])
in_full = partial(pytest.param, marks=pytest.mark.slow)
PUBLIC = {"learning_rate", "epoch", "epsilon", "noise_multiplier", "step"}
END = WORDS.index("</s>")


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def chosen() -> list[int]:
    return [at for at in range(SAMPLES) if CHOSEN[at]]


def mean_loss(model, prompt: list[int], labelled: list[int]):
    """The mean cross-entropy of some tokens after others, which are not padded."""
    logits = model(input_ids=torch.tensor([prompt + labelled])).logits[0, :-1].float()
    targets = torch.tensor((prompt + labelled)[1:])
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return losses[len(prompt) - 1 :].mean() if prompt else losses.mean()


def assert_step(trainer, total, *, tolerance: float = 1e-5) -> None:
    """Train a step, and compare the gradient that is stepped on with a clipped sum."""
    stepped = []

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            parameters = [p for p in trainer.model.parameters() if p.requires_grad]
            trainer.private_optimizer.original_optimizer.register_step_pre_hook(
                lambda *_: stepped.append(
                    torch.cat([p.grad.double().flatten() for p in parameters])
                )
            )

    trainer.add_callback(Watch())
    before = trained(trainer.model)
    trainer.train()
    (gradient,) = stepped
    assert total.norm() > BOUND
    assert (gradient.double() * (SAMPLES / 2) - total).norm() <= tolerance * total.norm()
    assert not torch.equal(trained(trainer.model), before)


class PadLeft(trl.trainer.sft_trainer.DataCollatorForLanguageModeling):
    def torch_call(self, examples):
        tokenizer = build_tokenizer("left")
        rows = [{"input_ids": one["input_ids"]} for one in examples]
        batch = tokenizer.pad(rows, return_tensors="pt")
        T = batch["input_ids"].shape[1]
        labels = [[-100] * (T - len(one["labels"])) + one["labels"] for one in examples]
        return dict(batch) | {"labels": torch.tensor(labels)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("whole", {"data_collator": PadLeft(0)}),
        ("lora", {"privacy": {"head": "kept"}}),
        in_full("whole", {}),
        in_full("lora", {}),
        in_full("nf4", {}),
        in_full("lora", {"privacy": {"method": "flash"}, "gradient_checkpointing": False}),
    ],
)
def test_completions_are_clipped_as_single_samples_are(kind, options, tmp_path) -> None:
    """The prompt has no loss; the base of 4 bits leaves adapters of 16 bits, which round."""
    trainer = make(PrivateSFTTrainer, tmp_path, kind=kind, **options)
    model = trainer.model
    losses = (
        mean_loss(model, ids_of(prompt_of(at)), [*ids_of(answer_of(at)), END]) for at in chosen()
    )
    assert_step(trainer, clipped_sum(model, losses), tolerance=0.01 if kind == "nf4" else 1e-5)


def test_of_a_chat_the_assistant_alone_has_a_loss(tmp_path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": prompt_of(at)},
                {"role": "assistant", "content": answer_of(at)},
            ]
        }
        for at in range(SAMPLES)
    ]
    trainer = make(PrivateSFTTrainer, tmp_path, data=rows, assistant_only_loss=True)
    losses = (
        mean_loss(
            trainer.model,
            ids_of(f"user {prompt_of(at)} assistant"),
            [*ids_of(answer_of(at)), END],
        )
        for at in chosen()
    )
    assert_step(trainer, clipped_sum(trainer.model, losses))


def test_of_a_text_every_token_has_a_loss(tmp_path) -> None:
    rows = [{"text": f"{prompt_of(at)} {answer_of(at)}"} for at in range(SAMPLES)]
    trainer = make(PrivateSFTTrainer, tmp_path, data=rows)
    losses = (mean_loss(trainer.model, [], [*ids_of(rows[at]["text"]), END]) for at in chosen())
    assert_step(trainer, clipped_sum(trainer.model, losses))


def log_probability(model, at: int, answer: str):
    prompt, labelled = ids_of(prompt_of(at)), [*ids_of(answer), END]
    return -mean_loss(model, prompt, labelled) * len(labelled), len(labelled)


def losses_of_pairs(model, references, loss_type: str, beta: float):
    """The losses of the papers on DPO, SLiC's hinge and IPO, of each chosen pair."""
    for at, reference in zip(chosen(), references, strict=True):
        answers = answer_of(at), answer_of(at + 5)
        (own, lengths) = zip(*(log_probability(model, at, one) for one in answers), strict=True)
        won, lost = (mine - its for mine, its in zip(own, reference, strict=True))
        yield {
            "sigmoid": lambda won=won, lost=lost: -torch.sigmoid(beta * (won - lost)).log(),
            "hinge": lambda won=won, lost=lost: (1 - beta * (won - lost)).clamp(min=0),
            "ipo": lambda won=won, lost=lost, n=lengths: (
                (won / n[0] - lost / n[1] - 1 / (2 * beta)) ** 2
            ),
        }[loss_type]()


def reference_of(trainer, kind: str) -> list[list[float]]:
    """What the model says before training: another one, or this one without its adapters."""
    model = build() if kind == "whole" else trainer.model
    with nullcontext() if kind == "whole" else model.disable_adapter():
        return [
            [float(log_probability(model, at, answer_of(at + more))[0]) for more in (0, 5)]
            for at in chosen()
        ]


@pytest.mark.parametrize(
    ("kind", "loss_type", "options"),
    [
        ("nf4", "sigmoid", {}),
        ("lora", "ipo", {}),
        ("whole", "sigmoid", {"precompute_ref_log_probs": True}),
        in_full("whole", "sigmoid", {}),
        in_full("lora", "sigmoid", {}),
        in_full("lora", "hinge", {}),
        in_full("lora", "sigmoid", {"privacy": {"method": "flash", "head": "chunked"}}),
    ],
)
def test_pairs_are_clipped_as_single_samples_are(kind, loss_type, options, tmp_path) -> None:
    model = build(kind)
    if kind == "whole":  # so that it differs from the reference
        options = options | {"ref_model": build()}
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=seeded(3))
    settings = {"kind": kind, "loss_type": loss_type, "model": model, "beta": 0.5}
    trainer = make(PrivateDPOTrainer, tmp_path, **settings | options)
    references = reference_of(trainer, kind)
    losses = losses_of_pairs(trainer.model, references, loss_type, 0.5)
    total = clipped_sum(trainer.model, losses)
    assert_step(trainer, total, tolerance=0.01 if kind == "nf4" else 1e-5)


def test_the_reference_of_adapters_that_were_trained_before_is_a_copy_of_them(tmp_path) -> None:
    """Its gradient is that of -log sigmoid(0), since nothing differs yet."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(), adapters("lora"))
    trainer = make(PrivateDPOTrainer, tmp_path, model=model, ref_model=None, beta=0.5)
    assert "ref" in trainer.model.peft_config
    with torch.no_grad():
        references = [
            [float(log_probability(trainer.model, at, answer_of(at + more))[0]) for more in (0, 5)]
            for at in chosen()
        ]
    losses = losses_of_pairs(trainer.model, references, "sigmoid", 0.5)
    assert_step(trainer, clipped_sum(trainer.model, losses))


@EACH
def test_a_run_that_was_stopped_ends_with_the_same_bits(trainer, tmp_path) -> None:
    privacy = {"noise_multiplier": 1.0, "delta": 1e-2, "accountant": "rdp", "resume": "exact"}
    options = {"privacy": privacy, "max_steps": 4, "kind": "lora", "optim": "adamw_torch"}
    options |= {"save_strategy": "steps", "save_steps": 1, "learning_rate": 0.01}
    whole = make(trainer, tmp_path, **options)
    whole.train()
    for stopped in (2,):
        again = make(trainer, tmp_path / "again", **options | {"save_strategy": "no"})
        again.privacy.noise_generator.manual_seed(8)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stopped}"))
        assert torch.equal(trained(again.model), trained(whole.model))
        assert again.spent.history == whole.spent.history == [(1.0, 0.5, 4)]
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.5, 4)]
    assert whole.spent.epsilon() == pytest.approx(accountant.get_epsilon(delta=1e-2), rel=1e-12)
    assert whole.state.log_history[-2]["epsilon"] == pytest.approx(whole.spent.epsilon(), abs=1e-4)


@EACH
def test_nothing_private_is_logged_unless_it_is_asked_for(trainer, tmp_path, caplog) -> None:
    """And what an evaluation logs is of its own data alone, as without privacy."""
    rows = (completions() if trainer is PrivateSFTTrainer else pairs())[:4]
    options = {"max_steps": 2, "eval_dataset": rows, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"privacy": {"noise_multiplier": 1.0, "delta": 1e-2, "accountant": "rdp"}}
    private = make(trainer, tmp_path, **options)
    private.train()
    of_training = [one for one in private.state.log_history if "eval_loss" not in one]
    assert set().union(*of_training) == PUBLIC
    evaluated = [one for one in private.state.log_history if "eval_loss" in one]
    assert [one["eval_num_tokens"] for one in evaluated] == [0, 0]
    again = private.evaluate()
    for name in ("eval_entropy", "eval_mean_token_accuracy"):
        assert again.get(name, evaluated[-1][name]) == evaluated[-1][name]

    options["privacy"]["log_private"] = True
    with caplog.at_level(logging.WARNING, "dpprof"):
        told = make(trainer, tmp_path, **options)
        told.train()
    assert "log_private logs losses, norms and counts of the drawn samples" in caplog.text
    logged = told.state.log_history[0]
    assert {"loss", "entropy", "mean_token_accuracy", "sample_norm_50%"} <= set(logged)
    assert torch.equal(trained(told.model), trained(private.model))  # asking changes no bits


def test_losses_are_those_of_trl(tmp_path) -> None:
    """For each sample alone, which is what TRL's mean over a batch of one is."""
    cases = [(PrivateSFTTrainer, {})]
    cases += [(PrivateDPOTrainer, {"loss_type": name}) for name in ("sigmoid", "hinge", "ipo")]
    for trainer, options in cases:
        private = make(trainer, tmp_path, kind="lora", **options)
        loader = private.get_train_dataloader().loader
        private.model.eval()
        with torch.no_grad():
            together = private.compute_sample_losses(private.model, loader.load(range(4)))
            alone = [
                private.compute_batch_loss(dict(loader.load(range(at, at + 1)))) for at in range(4)
            ]
        torch.testing.assert_close(together, torch.stack(alone).float(), rtol=1e-4, atol=1e-5)


def test_the_fine_tuning_of_the_page_trains_as_it_stands(tmp_path, monkeypatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, use_cpu=True))
    names = {"model": build(), "output_dir": str(tmp_path), "tokenizer": build_tokenizer()}
    names["dataset"] = datasets.Dataset.from_list(completions())
    exec(find_code(TRAINERS, "SFTConfig"), names)  # noqa: S102
    assert 0 < names["trainer"].spent.epsilon() <= 3.0


@pytest.mark.slow
def test_fine_tuning_is_captured(tmp_path, monkeypatch) -> None:
    rows = [{"input_ids": [5 + (at * by) % 20 for by in range(6)]} for at in range(SAMPLES)]
    options = {"max_steps": 8, "learning_rate": 0.1, "data": rows}
    with simulated_graphs(monkeypatch):
        auto, eager = (
            make(PrivateSFTTrainer, tmp_path, privacy={"execution": execution}, **options)
            for execution in ("auto", "eager")
        )
        auto.train()
        eager.train()
        assert auto.private_optimizer.captured.state_dict()["replayed"] > 3
    torch.testing.assert_close(trained(auto.model), trained(eager.model), rtol=1e-4, atol=1e-6)


class OwnLoss(trl.SFTTrainer):
    def compute_loss(self, *inputs, **named):
        return 2 * super().compute_loss(*inputs, **named)


class PrivateOwnLoss(PrivateSFTTrainer, OwnLoss):
    """Its loss is another one than the cross-entropy that would be clipped."""


def test_a_trainer_whose_loss_is_another_one_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="compute_loss of PrivateOwnLoss does; give it losses_of"):
        make(PrivateOwnLoss, tmp_path).train()


def test_what_joins_samples_or_is_not_supported_is_refused_by_name(tmp_path, monkeypatch) -> None:
    offloading = "trl.trainer.sft_trainer.get_act_offloading_ctx_manager"
    monkeypatch.setattr(offloading, lambda **_: nullcontext())  # it fails without a GPU
    trainers = {kind.__name__: kind for kind in (PrivateSFTTrainer, PrivateDPOTrainer)}

    def refuse(case) -> str:
        return refusals_of(partial(make, trainers[case[0]], tmp_path))(case[1])

    assert_sentences("clipping/trl", refuse)


def test_the_loss_of_a_router_is_refused(tmp_path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    config = transformers.MixtralConfig(**sizes, vocab_size=len(WORDS))
    model = transformers.MixtralForCausalLM(config)
    with pytest.raises(ValueError, match="router_aux_loss_coef is not allowed"):
        make(PrivateSFTTrainer, tmp_path, model=model)


def test_a_set_that_was_packed_before_is_refused_where_it_says_so(tmp_path) -> None:
    rows = [{"input_ids": [5, 6, 7, 5, 6, 7], "seq_lengths": [3, 3]} for _ in range(SAMPLES)]

    class Says(trl.trainer.sft_trainer.DataCollatorForLanguageModeling):
        def torch_call(self, examples):
            lengths = torch.tensor([one["seq_lengths"] for one in examples])
            return super().torch_call(examples) | {"seq_lengths": lengths}

    with pytest.raises(ValueError, match="seq_lengths is of packed samples"):
        make(PrivateSFTTrainer, tmp_path, data=rows, data_collator=Says(0)).train()
