"""Convolutional networks that are trained privately: with GroupNorm, as no sample may see another.

Where the original has BatchNorm, GroupNorm (Wu & He 2018) takes its place. Sources: He et al. 2016,
"Deep Residual Learning for Image Recognition" (ResNet-20 of section 4.2, whose shortcuts have no
parameters, and ResNet-50); Zagoruyko & Komodakis 2016, "Wide Residual Networks", as De et al. 2022,
"Unlocking High-Accuracy Differentially Private Image Classification through Scale", train them,
without their weight standardisation; Opacus's MNIST example.

Shape legend: B batch, C channels, H height, W width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn import functional

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.errors import UnsupportedError

Block = Callable[[int, int, int, int], nn.Module]
"""Builds a block from the channels that it gets and returns, its stride and its groups."""


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class PlainBlock(nn.Module):
    """Two convolutions beside a shortcut that skips pixels and adds channels of zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.stride, self.added = stride, outputs - inputs
        self.conv1, self.norm1 = _conv(inputs, outputs, 3, stride), nn.GroupNorm(groups, outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs, 3), nn.GroupNorm(groups, outputs)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Apply the block."""
        y_BCHW = functional.relu(self.norm1(self.conv1(x_BCHW)))
        y_BCHW = self.norm2(self.conv2(y_BCHW))
        if self.added or self.stride > 1:
            kept = x_BCHW[:, :, :: self.stride, :: self.stride]
            x_BCHW = functional.pad(kept, (0, 0, 0, 0, self.added // 2, self.added // 2))
        return functional.relu(y_BCHW + x_BCHW)


class Bottleneck(nn.Module):
    """A narrow 3 x 3 convolution between two of 1 x 1; its shortcut may be a convolution too."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        narrow = outputs // 4
        self.conv1, self.norm1 = _conv(inputs, narrow, 1), nn.GroupNorm(groups, narrow)
        self.conv2, self.norm2 = _conv(narrow, narrow, 3, stride), nn.GroupNorm(groups, narrow)
        self.conv3, self.norm3 = _conv(narrow, outputs, 1), nn.GroupNorm(groups, outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            norm = nn.GroupNorm(groups, outputs)
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), norm)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Apply the block."""
        y_BCHW = functional.relu(self.norm1(self.conv1(x_BCHW)))
        y_BCHW = functional.relu(self.norm2(self.conv2(y_BCHW)))
        return functional.relu(self.norm3(self.conv3(y_BCHW)) + self.shortcut(x_BCHW))


class WideBlock(nn.Module):
    """Two convolutions, each after its norm and activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inputs), _conv(inputs, outputs, 3, stride)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outputs), _conv(outputs, outputs, 3)
        is_equal = stride == 1 and inputs == outputs
        self.shortcut = None if is_equal else _conv(inputs, outputs, 1, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Apply the block."""
        y_BCHW = functional.relu(self.norm1(x_BCHW))
        if self.shortcut is not None:
            x_BCHW = self.shortcut(y_BCHW)
        y_BCHW = functional.relu(self.norm2(self.conv1(y_BCHW)))
        summed_BCHW: Tensor = x_BCHW + self.conv2(y_BCHW)
        return summed_BCHW


@dataclass(frozen=True)
class ResidualNetwork:
    """Stages of equal blocks between a first convolution and a linear layer.

    Each stage after the first halves height and width. Called with an experiment, it builds a
    module that maps images (B, 3, H, W) to logits (B, classes).

    Raises:
        UnsupportedError: Checkpointing, or another attention than the usual.
    """

    block: Block
    counts: Sequence[int]
    """Blocks of each stage."""

    widths: Sequence[int]
    """Channels of each stage."""

    groups: int
    """The groups of each GroupNorm."""

    classes: int
    first_width: int = 16
    is_for_large_images: bool = False
    """Whether the first layers reduce height and width to a quarter."""

    norms_last: bool = False
    """Whether a norm and an activation follow the last block, and none the first convolution."""

    def __call__(self, experiment: Experiment) -> nn.Module:
        """Build the module."""
        refuse_settings(experiment)
        return _Residual(self)

    def reduce(self) -> "ResidualNetwork":
        """Return a small network with the same layers, for verification."""
        counts = [1] * len(self.counts)
        widths = [8, *[16] * (len(counts) - 1)]
        small = replace(self, counts=counts, widths=widths, groups=2, classes=5)
        return replace(small, first_width=4)


class _Residual(nn.Module):
    def __init__(self, of: ResidualNetwork) -> None:
        super().__init__()
        norm = nn.Identity() if of.norms_last else nn.GroupNorm(of.groups, of.first_width)
        activation = nn.Identity() if of.norms_last else nn.ReLU()
        if of.is_for_large_images:
            first, pool = _conv(3, of.first_width, 7, 2), nn.MaxPool2d(3, 2, padding=1)
            self.first = nn.Sequential(first, norm, activation, pool)
        else:
            self.first = nn.Sequential(_conv(3, of.first_width, 3), norm, activation)
        blocks: list[nn.Module] = []
        inputs = of.first_width
        for stage, (count, outputs) in enumerate(zip(of.counts, of.widths, strict=True)):
            for index in range(count):
                stride = 2 if stage and not index else 1
                blocks.append(of.block(inputs, outputs, stride, of.groups))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential()
        if of.norms_last:
            self.last = nn.Sequential(nn.GroupNorm(of.groups, inputs), nn.ReLU())
        self.head = nn.Linear(inputs, of.classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits of the classes; (B, classes)."""
        y_BCHW = self.last(self.blocks(self.first(x_BCHW)))
        logits_BC: Tensor = self.head(y_BCHW.mean((2, 3)))
        return logits_BC


def build_opacus_cnn(experiment: Experiment) -> nn.Module:
    """Build the network of Opacus's MNIST example; (B, 1, H, W) to (B, 10).

    Raises:
        UnsupportedError: Checkpointing, another attention than the usual, or images so small that
            nothing is left of them.
    """
    refuse_settings(experiment)
    assert experiment.image_size is not None
    # What is left after the convolutions, of strides 2 and 2, and the poolings.
    side = ((experiment.image_size - 2) // 2 - 4) // 2
    if side < 1:
        raise UnsupportedError(
            f"opacus-cnn takes images of at least 14 pixels, and image_size is "
            f"{experiment.image_size}"
        )
    return _OpacusCnn(side)


class _OpacusCnn(nn.Module):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
            *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)),
        )
        self.linear = nn.Linear(32 * side * side, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits of the classes; (B, 10)."""
        y_BD = self.linear(self.convolutions(x_BCHW).flatten(1))
        logits_BC: Tensor = self.head(functional.relu(y_BD))
        return logits_BC


def refuse_settings(experiment: Experiment) -> None:
    """Refuse settings that a network without blocks of attention does not have."""
    name = experiment.model_name
    if experiment.checkpointing != "none":
        raise UnsupportedError(
            f"{name} is a convolutional network, which is not built with checkpointing "
            f"{experiment.checkpointing}; leave it out"
        )
    if experiment.attention != "sdpa":
        raise UnsupportedError(
            f"{name} is a convolutional network without attention; leave attention "
            f"{experiment.attention} out"
        )


def _wide(depth: int, widening: int) -> ResidualNetwork:
    """Return WRN-depth-widening for CIFAR-10."""
    count = (depth - 4) // 6
    widths = [16 * widening, 32 * widening, 64 * widening]
    return ResidualNetwork(WideBlock, [count] * 3, widths, groups=16, classes=10, norms_last=True)


RESNET20_GN = ResidualNetwork(PlainBlock, [3, 3, 3], [16, 32, 64], groups=8, classes=10)
RESNET50_GN = ResidualNetwork(
    Bottleneck,
    [3, 4, 6, 3],
    [256, 512, 1024, 2048],
    groups=32,
    classes=1000,
    first_width=64,
    is_for_large_images=True,
)
WRN_16_4 = _wide(16, 4)
WRN_40_4 = _wide(40, 4)
