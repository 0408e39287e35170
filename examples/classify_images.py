"""Train an image model privately, on generated images.

python examples/classify_images.py
python examples/classify_images.py --model google/vit-base-patch16-224
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForImageClassification

from compare import compare_methods
from dpprof.private import make_private

SAMPLES, CLASSES = 512, 4


def generate(size: int) -> tuple[Tensor, Tensor]:
    """Generate noise with a bright corner, and which corner it is."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 3, size, size, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    half = size // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 0.7
    return images, labels


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return one row for each image."""
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


def build(name: str | None) -> tuple[nn.Module, int]:
    """Load a model by its name, or build a small one; return the size of its images too."""
    if name is not None:
        options = {"num_labels": CLASSES, "ignore_mismatched_sizes": True}
        model = AutoModelForImageClassification.from_pretrained(name, **options)
        return Logits(model), model.config.image_size
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(c, p, 3, 2, 1), nn.GroupNorm(4, p), nn.ReLU())
        for c, p in ((3, 16), (16, 32), (32, 64))
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, CLASSES))
    return nn.Sequential(*blocks, head), 32


def losses_of_model(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Compute each image's loss."""
    return functional.cross_entropy(model(images), labels, reduction="none")


def main() -> None:
    """Train, and say what was spent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a name on the hub, or a folder")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--max-batch-size", type=int, default=64)
    arguments = parser.parse_args()
    model, size = build(arguments.model)
    images, labels = generate(size)

    def losses_of(images: Tensor, labels: Tensor) -> Tensor:
        return losses_of_model(model, images, labels)

    compare_methods(model, losses_of_model, (images[:32], labels[:32]))
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True),
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
            right = model(images).argmax(1) == labels
        print(f"epoch {epoch + 1}: accuracy {right.float().mean():.2f}")
    print(f"epsilon {private.epsilon_spent():.2f} at delta {private.delta}")


if __name__ == "__main__":
    main()
