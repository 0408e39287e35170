"""A training loop as a user of Opacus would write it; knows nothing of dpprof.

It trains the same model on the same kind of batch as ``clean`` times, so that what dpprof
adds to a step can be measured.

Shape legend: B batch, T tokens, D d_model, H heads, K head width (D / H), V vocabulary.
"""

from collections.abc import Callable

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

METHODS = ("standard", "opacus-hooks", "opacus-ghost")
_GRAD_SAMPLE_MODES = {"opacus-hooks": "hooks", "opacus-ghost": "ghost"}


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.norm_2 = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform the residual stream; (B, T, D) to (B, T, D)."""
        B, T, D = x_BTD.shape
        heads = (B, T, self.heads, D // self.heads)
        q, k, v = (
            part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x_BTD)).chunk(3, -1)
        )
        y_BHTK = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))
        updated_BTD: Tensor = x_BTD + self.down(functional.gelu(self.up(self.norm_2(x_BTD))))
        return updated_BTD


class LanguageModel(nn.Module):
    """Token ids (B, T) in, logits (B, T, V) out."""

    def __init__(
        self, vocab_size: int, d_model: int, layers: int, heads: int, seq_len: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(seq_len, d_model)
        self.blocks = nn.Sequential(*(Block(d_model, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Predict every next token."""
        B, T = tokens_BT.shape
        x_BTD = self.tokens(tokens_BT) + self.positions(torch.arange(T).repeat(B, 1))
        logits_BTV: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits_BTV


def make_batch(vocab_size: int, B: int, T: int) -> tuple[Tensor, Tensor]:
    """Draw tokens and the next ones, each (B, T)."""
    tokens_BT = torch.randint(vocab_size, (B, T + 1))
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def make_step(
    model: LanguageModel, method: str, tokens_BT: Tensor, labels_BT: Tensor, noise_multiplier: float
) -> Callable[[], None]:
    """Return what does one training step, as Opacus's documentation writes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    shape = {}
    trained: nn.Module = model
    if method in _GRAD_SAMPLE_MODES:
        loader = DataLoader(TensorDataset(tokens_BT), batch_size=len(tokens_BT))
        mode = _GRAD_SAMPLE_MODES[method]
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        trained, optimizer = made[0], made[1]
        if mode == "ghost":
            criterion = made[2]
            shape = {"shape": (*tokens_BT.shape, model.head.out_features)}

    def step() -> None:
        logits_BTV = trained(tokens_BT)
        loss = criterion(logits_BTV.flatten(0, 1), labels_BT.flatten(), **shape)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
