"""Image classifiers that people train privately, as their papers define them, with group norms.

To be replaced by presets of ``dpprof.models`` once these have convolutions.
Nothing works in place: the hooks of Opacus refuse that.
"""

from torch import Tensor, nn


class PreActivation(nn.Module):
    """A block of a wide ResNet (Zagoruyko and Komodakis 2016): norm, ReLU and convolution twice."""

    def __init__(self, C: int, p: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(16, C), nn.GroupNorm(16, p)])
        self.first = nn.Conv2d(C, p, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(p, p, 3, 1, 1, bias=False)
        self.skip = None if p == C else nn.Conv2d(C, p, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        rectified = self.norms[0](x).relu()
        y: Tensor = self.second(self.norms[1](self.first(rectified)).relu())
        return y + (x if self.skip is None else self.skip(rectified))


def wide_resnet(depth: int = 16, width: int = 4, classes: int = 10) -> nn.Module:
    """Make a WRN-depth-width for images of 32 x 32, as De et al. 2022 train it on CIFAR-10."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    C = 16
    for group, p in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range((depth - 4) // 6):
            layers.append(PreActivation(C, p, 2 if group and not block else 1))
            C = p
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, classes))
    return nn.Sequential(*layers, nn.GroupNorm(16, C), nn.ReLU(), *head)


class Bottleneck(nn.Module):
    """A block of a ResNet-50 (He et al. 2016), with group norms."""

    def __init__(self, C: int, p: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(C, p, 1, bias=False), nn.GroupNorm(32, p), nn.ReLU()),
            *(nn.Conv2d(p, p, 3, stride, 1, bias=False), nn.GroupNorm(32, p)),
            *(nn.ReLU(), nn.Conv2d(p, 4 * p, 1, bias=False), nn.GroupNorm(32, 4 * p)),
        )
        self.skip = nn.Sequential()
        if 4 * p != C:
            skip = nn.Conv2d(C, 4 * p, 1, stride, bias=False)
            self.skip = nn.Sequential(skip, nn.GroupNorm(32, 4 * p))

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        y: Tensor = self.body(x) + self.skip(x)
        return y.relu()


def resnet50(classes: int = 1000) -> nn.Module:
    """Make a ResNet-50 with group norms."""
    layers: list[nn.Module] = [
        *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.ReLU()),
        nn.MaxPool2d(3, 2, 1),
    ]
    C = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        p = 64 * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(C, p, 2 if stage and not block else 1))
            C = 4 * p
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, classes))
    return nn.Sequential(*layers, *head)


def tutorial_cnn() -> nn.Module:
    """Make the network of Opacus's tutorial for MNIST."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten()),
        *(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
