"""Run the training loop of a document as somebody would who copies it from there."""

import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

text = Path(sys.argv[1]).read_text(encoding="utf-8")
blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
loop = next(block for block in blocks if "NoisyOptimizer" in block)
VOCABULARY, T = 16, 5
model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8), nn.Linear(8, VOCABULARY))
before = [parameter.detach().clone() for parameter in model.parameters()]
ids, labels = (torch.randint(VOCABULARY, (40, T)) for _ in range(2))
loader = DataLoader(TensorDataset(ids, labels), batch_size=4)
names = {"model": model, "data_loader": loader}
exec(compile(loop, sys.argv[1], "exec"), names)  # noqa: S102 (the document is the project's own)
pairs = zip(before, model.parameters(), strict=True)
assert all(not torch.equal(old, new) for old, new in pairs), "the loop trained nothing"
print("epsilon", names["accountant"].get_epsilon(delta=1e-5))
