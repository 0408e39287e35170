"""Fine-tune a BERT classifier privately, in an ordinary loop.

python examples/classify_text.py
python examples/classify_text.py --model roberta-base
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForSequenceClassification, BertConfig

from compare import compare_methods
from dpprof.private import make_private

SAMPLES, TOKENS = 512, 16


def generate() -> tuple[Tensor, Tensor]:
    """Generate sequences, and whether a word is in them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (SAMPLES, TOKENS), generator=generator)
    labels = torch.randint(2, (SAMPLES,), generator=generator)
    ids[labels == 1, 3] = 1
    return ids, labels


def build(name: str | None) -> nn.Module:
    """Load a model by its name, or build a small one with random weights."""
    if name is not None:
        return AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4}
    return AutoModelForSequenceClassification.from_config(BertConfig(**sizes, **heads))


def losses_of_model(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Compute each sample's loss."""
    return functional.cross_entropy(model(input_ids=ids).logits, labels, reduction="none")


def main() -> None:
    """Train, and say what was spent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a name on the hub, or a folder")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--max-batch-size", type=int, default=32)
    arguments = parser.parse_args()
    model, (ids, labels) = build(arguments.model), generate()

    def losses_of(ids: Tensor, labels: Tensor) -> Tensor:
        return losses_of_model(model, ids, labels)

    compare_methods(model, losses_of_model, (ids[:32], labels[:32]))
    private = make_private(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(TensorDataset(ids, labels), batch_size=64, shuffle=True),
        losses_of,
        max_grad_norm=0.5,
        epsilon=arguments.epsilon,
        delta=1e-4,
        epochs=arguments.epochs,
        max_batch_size=arguments.max_batch_size,
    )
    model, optimizer, data_loader = private
    for epoch in range(arguments.epochs):
        model.train()
        for batch in data_loader:
            optimizer.backward(losses_of, *batch)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = model(input_ids=ids).logits.argmax(1) == labels
        print(f"epoch {epoch + 1}: accuracy {right.float().mean():.2f}")
    print(f"epsilon {private.epsilon_spent():.2f} at delta {private.delta}")


if __name__ == "__main__":
    main()
