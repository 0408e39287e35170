"""Hugging Face's causal language models without logits: the gradients of one sample at a time."""

import functools

import pytest
import torch
from small_models import FLAT, TINY, assert_exact, one_by_one
from torch import Tensor, nn
from torch.nn import functional

from dpprof.private import BookKeeping, UnsupportedError, causal_lm_losses
from dpprof.private.layers import head

transformers = pytest.importorskip("transformers")

B, T, V = 3, 5, 23
SIZES = TINY | {"vocab_size": V, "num_key_value_heads": 2, "pad_token_id": 0}
MODELS = {
    "llama": {},
    "gemma2": {"head_dim": 4, "final_logit_softcapping": 0.7},
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16},
    "phi": {},
    "cohere": {"logit_scale": 0.3},
    "qwen2": {},
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES | MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    if name == "qwen2":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, V, (B, T), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :2], labels[1, 3:], mask[1, 3:] = -100, -100, 0
    return ids, labels, mask


def with_logits(model: nn.Module, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    losses = functional.cross_entropy(logits.mT, labels[:, 1:], reduction="none")
    return losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_are_those_of_one_sample_at_a_time(name, keep, monkeypatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 3 * V)  # three rows
    model = build(name)
    expected = one_by_one(functools.partial(with_logits, model), model, batch())

    def losses_of(ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return causal_lm_losses(model, ids, labels, attention_mask=mask, keep=keep)

    for way in FLAT:
        assert_exact(way, model, batch(), losses_of, expected=expected, tolerance=1e-5).remove()
        model.zero_grad()


def test_a_sample_without_labels_has_the_loss_zero() -> None:
    ids, labels, _ = batch()
    labels[2] = -100
    losses = causal_lm_losses(build("llama"), ids, labels)

    assert losses[2] == 0
    assert (losses[:2] > 0).all()


def test_a_model_that_drops_units_is_compared_without() -> None:
    config = transformers.GPT2Config(**MODELS["gpt2"], vocab_size=V)  # which drops a tenth
    model = transformers.GPT2LMHeadModel(config).train()
    ids, labels, _ = batch()
    causal_lm_losses(model, ids, labels)

    assert all(module.training for module in model.modules())


class Doubled(transformers.LlamaForCausalLM):
    """A model whose logits are not what its head returns."""

    def forward(self, *inputs, **named):
        out = super().forward(*inputs, **named)
        if out.loss is not None:
            out.loss = 2 * out.loss
        return out


def test_a_model_with_another_loss_is_refused() -> None:
    model = Doubled(transformers.LlamaConfig(**SIZES))
    BookKeeping(model, 1.0)
    with pytest.raises(UnsupportedError, match="Doubled computes its loss otherwise than as the"):
        causal_lm_losses(model, *batch()[:2])


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not say which layer makes the logits"):
        causal_lm_losses(nn.Linear(2, 2), *batch()[:2])
