"""Recurrent classifiers and language models: a table, an LSTM, GRU or plain RNN, a linear head.

``attention`` opacus builds Opacus's ``DPLSTM``, ``DPGRU`` and ``DPRNN``, which its methods need, in
the place of PyTorch's layers. Sources: Opacus's example char-lstm-classification; Zaremba et al.
2014, "Recurrent Neural Network Regularization", section 4.1, without dropout.

Shape legend: B batch, T tokens, D width of an embedding or state, V vocabulary.
"""

from typing import Any

from torch import Tensor, nn

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.naming import RecurrentSizes
from dpprof.private.errors import UnsupportedError

_CHECKPOINTING = ("non-reentrant", "reentrant")


def build_recurrent(sizes: RecurrentSizes, experiment: Experiment) -> nn.Module:
    """Build a network of these sizes.

    It maps token ids (B, T) to the logits of classes, (B, classes), from the last step's state, or
    of tokens, (B, T, V).

    Raises:
        UnsupportedError: Checkpointing, or attention eager.
    """
    for key, refused in (("attention", ("eager",)), ("checkpointing", _CHECKPOINTING)):
        if (value := getattr(experiment, key)) in refused:
            raise UnsupportedError(
                f"{experiment.model_name} is a recurrent network, which is not built with "
                f"{key} {value}; leave it out"
            )
    return _Recurrent(sizes, is_opacus=experiment.attention == "opacus")


class _Recurrent(nn.Module):
    def __init__(self, of: RecurrentSizes, *, is_opacus: bool) -> None:
        super().__init__()
        self.is_classifier = of.classes is not None
        self.embedding = nn.Embedding(of.vocab_size, of.embedding)
        build: Any = getattr(nn, of.kind)
        if is_opacus:
            from opacus import layers  # noqa: PLC0415 (slow, and for few)

            build = getattr(layers, f"DP{of.kind}")
        self.rnn = build(of.embedding, of.hidden, num_layers=of.layers, batch_first=True)
        self.head = nn.Linear(of.hidden, of.classes or of.vocab_size)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Return the logits of the classes, (B, classes), or of the next tokens, (B, T, V)."""
        h_BTD, _ = self.rnn(self.embedding(x_BT))
        logits: Tensor = self.head(h_BTD[:, -1] if self.is_classifier else h_BTD)
        return logits


CHAR_LSTM = RecurrentSizes(kind="LSTM", vocab_size=259, embedding=64, hidden=128, classes=18)
"""Of bytes and 3 more, and 18 languages."""

CHAR_GRU = CHAR_LSTM.model_copy(update={"kind": "GRU"})
CHAR_RNN = CHAR_LSTM.model_copy(update={"kind": "RNN"})
PTB_LSTM_SMALL = RecurrentSizes(kind="LSTM", vocab_size=10_000, embedding=200, hidden=200, layers=2)
PTB_LSTM_MEDIUM = PTB_LSTM_SMALL.model_copy(update={"embedding": 650, "hidden": 650})
