"""A small model that mixes tokens and channels by linear layers.

Shape legend: B batch, T tokens, D width, V vocabulary.
"""

from torch import Tensor, nn

from dpprof.experiments.config.experiment import Experiment


class Mixer(nn.Module):
    """Token ids (B, T) to logits (B, T, V)."""

    def __init__(self, seq_len: int, width: int = 32, vocab_size: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.norm = nn.LayerNorm(width)
        self.mix_tokens = nn.Linear(seq_len, seq_len)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Mix the tokens and predict."""
        x_BTD = self.embedding(tokens_BT)
        x_BTD = x_BTD + self.mix_tokens(self.norm(x_BTD).mT).mT
        logits_BTV: Tensor = self.head(x_BTD)
        return logits_BTV


def build(experiment: Experiment) -> nn.Module:
    """Build the model for the experiment's sequence length."""
    return Mixer(experiment.seq_len)
