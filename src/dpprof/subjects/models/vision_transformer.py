"""A vision transformer on which every Opacus method works.

Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words". The class token and the positions
are lookup tables, so that every parameter is in a layer that Opacus has a rule for. The numbers are
the same as with parameters that are added. Patches are projected by a linear layer, which computes
what a convolution computes whose stride is its size.

Shape legend: B batch, N patches and the class token, D width, C channels, H height, W width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.models.transformer import Block, find_attention, run_blocks


@dataclass(frozen=True)
class VisionTransformerSize:
    """The size of a vision transformer; its MLP is four times as wide.

    Called with an experiment, it builds a module that maps images (B, 3, H, W) to logits (B,
    classes).

    Raises:
        UnsupportedError: Patches do not divide the experiment's images.
    """

    patch: int
    d_model: int
    layers: int
    heads: int
    classes: int

    def __call__(self, experiment: Experiment) -> nn.Module:
        """Build the module."""
        image = experiment.image_size
        assert image is not None
        if image % self.patch:
            raise UnsupportedError(
                f"{experiment.model_name} divides an image into patches of {self.patch} pixels, "
                f"and image_size {image} is no multiple of that"
            )
        return VisionTransformer(self, image, experiment)

    def reduce(self) -> "VisionTransformerSize":
        """Return the size of a small model with the same layers, for verification."""
        return VisionTransformerSize(patch=self.patch, d_model=12, layers=2, heads=3, classes=5)


class VisionTransformer(nn.Module):
    """Maps images to logits of classes."""

    def __init__(self, size: VisionTransformerSize, image: int, experiment: Experiment) -> None:
        super().__init__()
        self.checkpointing = experiment.checkpointing, experiment.checkpointed_share
        D = size.d_model
        self.patch = size.patch
        self.patches = nn.Linear(3 * size.patch**2, D)
        self.class_token = nn.Embedding(1, D)
        self.positions = nn.Embedding(1 + (image // size.patch) ** 2, D)
        build_attention = find_attention(experiment.attention, is_causal=False)
        self.blocks = nn.Sequential(
            *(Block(D, build_attention(D, size.heads)) for _ in range(size.layers))
        )
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, size.classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits of the classes; (B, C, H, W) to (B, classes)."""
        patches_BND = self.patches(self._cut(x_BCHW))
        B, N = patches_BND.shape[0], patches_BND.shape[1] + 1
        first_B1 = torch.zeros(B, 1, dtype=torch.int64, device=x_BCHW.device)
        positions_BN = torch.arange(N, device=x_BCHW.device).repeat(B, 1)
        y_BND = torch.cat([self.class_token(first_B1), patches_BND], dim=1)
        y_BND = run_blocks(self.blocks, y_BND + self.positions(positions_BN), *self.checkpointing)
        logits_BC: Tensor = self.head(self.norm(y_BND)[:, 0])
        return logits_BC

    def _cut(self, x_BCHW: Tensor) -> Tensor:
        """Return the pixels of each patch; (B, N - 1, C x patch x patch)."""
        B, C, H, W = x_BCHW.shape
        cut = x_BCHW.view(B, C, H // self.patch, self.patch, W // self.patch, self.patch)
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


VIT_B16 = VisionTransformerSize(patch=16, d_model=768, layers=12, heads=12, classes=1000)
