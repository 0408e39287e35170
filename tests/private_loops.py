"""Users' private training loops, right ones and wrong ones, by dpprof, by Opacus and by hand.

Shape legend: B samples, T tokens, V vocabulary.
"""

from typing import NamedTuple

import pytest
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from dpprof.private import BookKeeping, FlashClipping, Mechanism, NoisyOptimizer, check

B, T, V = 4, 6, 13


SETTINGS = {"noise_multiplier": 0.8, "expected_batch_size": 5}
BOUND = 0.5


def build_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.1), nn.Linear(7, 3))


def build_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=T, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=False
    )
    return transformers.GPT2LMHeadModel(config)


def build_llama():
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=T,
        tie_word_embeddings=False,
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def points():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, 5, generator=generator), torch.randn(B, 3, generator=generator)


def tokens(*, left: bool = False):
    """Ids, mask and labels; three samples are padded."""
    generator = torch.Generator().manual_seed(2)
    ids_BT = torch.randint(1, V, (B, T), generator=generator)
    lengths_B = torch.tensor([6, 4, 5, 3])[:, None]
    at_T = torch.arange(T)
    mask_BT = (at_T >= T - lengths_B if left else at_T < lengths_B).long()
    ids_BT = ids_BT * mask_BT
    has_label_BT = (mask_BT == 1) & (mask_BT.cumsum(1) > 1)  # no padding predicts a token
    return ids_BT, mask_BT, ids_BT.masked_fill(~has_label_BT, -100)


def points_loss(model, x, y):
    return (model(x) - y).square().mean(1)


def noisy_loss(model, x, y):
    """Losses that draw numbers."""
    return points_loss(model, x + torch.randn_like(x), y * torch.rand(()))


def logits_of(model, ids_BT, mask_BT):
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)  # from each sample's own first token
    found = model(
        input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=False
    )
    return found.logits[:, :-1]


def token_loss(model, ids_BT, mask_BT, labels_BT):
    labels_BT = labels_BT[:, 1:]
    logits_BVT = logits_of(model, ids_BT, mask_BT).transpose(1, 2)
    losses_BT = functional.cross_entropy(logits_BVT, labels_BT, reduction="none")
    return losses_BT.sum(1) / (labels_BT != -100).sum(1)


class Setup(NamedTuple):
    model: nn.Module
    loss: object
    private: object

    def check(self, batch=None, **others):
        return check(
            self.model, self.loss, points() if batch is None else batch, self.private, **others
        )


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def with_dpprof(way, model, loss):
    clipping = way(model, BOUND)
    return Setup(model, loss, NoisyOptimizer(SGD(trained(model), lr=0.1), clipping, **SETTINGS))


def with_hooks(model, loss, *, functorch: bool = False):
    wrapped = GradSampleModule(model, force_functorch=functorch)
    optimizer = DPOptimizer(SGD(trained(model), lr=0.1), max_grad_norm=BOUND, **SETTINGS)
    return Setup(wrapped, loss, optimizer)


def with_ghost(model, loss, *, ghost: bool = True, bound: float = BOUND):
    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=bound, use_ghost_clipping=ghost
    )
    optimizer = DPOptimizerFastGradientClipping(
        SGD(trained(model), lr=0.1), max_grad_norm=BOUND, **SETTINGS
    )

    class Criterion:
        """A loss of one entry a sample, as Opacus's wrapper calls it."""

        reduction = "mean"

        def __call__(self, *batch):
            return loss(*batch)

    return Setup(wrapped, DPLossFastGradientClipping(wrapped, optimizer, Criterion()), optimizer)


WAYS = {
    "flash-bk": lambda model, loss: with_dpprof(BookKeeping, model, loss),
    "flash": lambda model, loss: with_dpprof(FlashClipping, model, loss),
    "opacus hooks": with_hooks,
    "opacus functorch": lambda model, loss: with_hooks(model, loss, functorch=True),
    "opacus ghost": with_ghost,
    "opacus fast gradient clipping": lambda model, loss: with_ghost(model, loss, ghost=False),
}


MODELS = {
    "mlp": (build_mlp, points_loss, points),
    "gpt2": (build_gpt2, token_loss, tokens),
    "llama": (build_llama, token_loss, tokens),
}


class ByHand:
    """A loop of single samples, and what it says of itself; or with something wrong."""

    def __init__(self, model, loss, wrong: str = "nothing") -> None:
        self.model, self.loss, self.wrong = model, loss, wrong
        self.optimizer = SGD(trained(model), lr=0.1)
        self.mechanism = Mechanism(self.optimizer, max_grad_norm=BOUND, **SETTINGS)

    def clip(self, parts):
        bound = 2 * BOUND if self.wrong == "bound" else BOUND
        norm = torch.cat([part.flatten() for part in parts]).norm()
        return [part * (bound / (norm + 1e-6)).clamp(max=1) for part in parts]

    def sum(self, *batch):
        clips_the_sum = self.wrong == "clips the sum"
        sums = [torch.zeros_like(p) for p in trained(self.model)]
        for sample in zip(*batch, strict=True):
            one = self.loss(self.model, *(part[None] for part in sample)).sum()
            parts = torch.autograd.grad(one, trained(self.model))
            parts = parts if clips_the_sum else self.clip(parts)
            sums = [total + part for total, part in zip(sums, parts, strict=True)]
        return self.clip(sums) if clips_the_sum else sums

    def give(self, sums) -> None:
        std = (
            SETTINGS["noise_multiplier"]
            * BOUND
            * {"noise": 1.1, "half noise": 0.5}.get(self.wrong, 1)
        )
        for at, (p, total) in enumerate(zip(trained(self.model), sums, strict=True)):
            if self.wrong == "seed":
                torch.manual_seed(0)
            is_noised = not (self.wrong == "no noise" and at == 2)
            given = (total + std * torch.randn_like(p) * is_noised) / 5
            given = given / 5 if self.wrong == "divided twice" else given
            p.grad = given if p.grad is None else p.grad + given

    def step(self, *batch) -> None:
        if self.wrong != "clears nothing":
            self.optimizer.zero_grad()
        self.give(self.sum(*batch))
        if self.wrong == "dropped":
            self.model[0].bias.grad = None
        for _ in range({"forgets to step": 0, "steps twice": 2}.get(self.wrong, 1)):
            self.optimizer.step()
        if self.wrong == "thaws":
            self.model[0].weight.data += 1


def check_by_hand(model, loss=points_loss, wrong: str = "nothing"):
    loop = ByHand(model, loss, wrong)
    return check(model, loss, points(), loop.mechanism, step=loop.step)
