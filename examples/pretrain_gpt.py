"""Train a small GPT from scratch, privately, on generated text.

python examples/pretrain_gpt.py
python examples/pretrain_gpt.py --model gpt2 --max-batch-size 4
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from compare import compare_methods
from dpprof.private import causal_lm_losses, make_private

SAMPLES, TOKENS = 512, 32


def generate(vocabulary: int) -> Tensor:
    """Generate sequences that count upwards in steps of their own; (B, T)."""
    generator = torch.Generator().manual_seed(0)
    first, step = (torch.randint(1, 50, (SAMPLES, 1), generator=generator) for _ in range(2))
    return (first + step * torch.arange(TOKENS)) % min(vocabulary, 97)


def build(name: str | None) -> nn.Module:
    """Build a model with random weights: a small one, or that of a name or config.json."""
    if name is not None:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    return AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=TOKENS)
    )


def main() -> None:
    """Train, and say what was spent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a name on the hub, or a folder with config.json")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--max-batch-size", type=int, default=32)
    arguments = parser.parse_args()
    model = build(arguments.model)

    def losses_of(ids: Tensor) -> Tensor:
        return causal_lm_losses(model, ids, ids)

    ids = generate(model.config.vocab_size)
    compare_methods(model, lambda one, ids: causal_lm_losses(one, ids, ids), (ids[:16],))
    private = make_private(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        DataLoader(TensorDataset(ids), batch_size=128, shuffle=True),
        losses_of,
        max_grad_norm=1.0,
        epsilon=arguments.epsilon,
        delta=1e-4,
        epochs=arguments.epochs,
        max_batch_size=arguments.max_batch_size,
    )
    model, optimizer, data_loader = private
    for epoch in range(arguments.epochs):
        for batch in data_loader:
            optimizer.backward(losses_of, *batch)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = losses_of(ids[:64]).mean()  # of generated data: that of people is not printed
        print(f"epoch {epoch + 1}: loss {loss:.3f}")
    print(f"epsilon {private.epsilon_spent():.2f} at delta {private.delta}")


if __name__ == "__main__":
    main()
