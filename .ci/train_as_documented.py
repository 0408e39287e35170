"""Run a training loop of a document, with a word in it, as somebody would who copies it."""

import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

text = Path(sys.argv[1]).read_text(encoding="utf-8")
blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
loop = next(block for block in blocks if sys.argv[2] in block)
VOCABULARY, T = 16, 5
model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8), nn.Linear(8, VOCABULARY))
before = [parameter.detach().clone() for parameter in model.parameters()]
ids, labels = (torch.randint(VOCABULARY, (40, T)) for _ in range(2))
loader = DataLoader(TensorDataset(ids, labels), batch_size=4)


def sample_losses(tokens: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss of each sample, (B,)."""
    logits = model(tokens).transpose(1, 2)
    return nn.functional.cross_entropy(logits, targets, reduction="none").mean(1)


names = {"model": model, "data_loader": loader, "sample_losses": sample_losses}
names["optimizer"] = torch.optim.AdamW(model.parameters())
exec(compile(loop, sys.argv[1], "exec"), names)  # noqa: S102 (the document is the project's own)
pairs = zip(before, model.parameters(), strict=True)
assert all(not torch.equal(old, new) for old, new in pairs), "the loop trained nothing"
spent = (
    names["private"].epsilon_spent()
    if "private" in names
    else names["accountant"].get_epsilon(delta=1e-5)
)
print("epsilon", spent)
