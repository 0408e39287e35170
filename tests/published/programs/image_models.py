"""Image models that others trained privately, with group norm in place of batch norm.

Shape legend: B images, C channels, H height, W width.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

Norm = Callable[[int], nn.Module]
_STAGES = 64, 128, 256, 512
_BLOCKS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
_DEEP = "resnet50", "resnet101", "resnet152"

_VGG = {
    "vgg11": ((64,), (128,), (256,) * 2, (512,) * 2, (512,) * 2),
    "vgg13": ((64,) * 2, (128,) * 2, (256,) * 2, (512,) * 2, (512,) * 2),
    "vgg16": ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3),
}
"""Channels of the convolutions between two poolings."""


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class _Residual(nn.Module):
    def __init__(self, layers: Sequence[nn.Conv2d], norm: Norm, *, for_photos: bool) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(layers)
        self.norms = nn.ModuleList(norm(layer.out_channels) for layer in layers)
        first, last = layers[0].in_channels, layers[-1].out_channels
        stride = max(layer.stride[0] for layer in layers)
        is_same = stride == 1 and first == last
        self.shortcut = (
            None if is_same else nn.Sequential(_conv(first, last, 1, stride), norm(last))
        )
        self.for_photos = for_photos

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out = x_BCHW
        for at, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            out = functional.relu(out, self.for_photos) if at else out
            out = _between(norm(convolution(out)), last=self.for_photos)
        beside = x_BCHW if self.shortcut is None else self.shortcut(x_BCHW)
        out = out.add_(beside) if self.for_photos else out + beside
        return functional.relu(out, self.for_photos)


def _between(x_BCHW: Tensor, *, last: bool) -> Tensor:
    """Return images with their channels last, or as they are."""
    return x_BCHW.to(memory_format=torch.channels_last) if last else x_BCHW


class ResNet(nn.Module):
    """A residual network.

    Args:
        name: Which one.
        norm: Makes the norm of a number of channels.
        classes: How many it tells apart.
        for_photos: Whether it is torchvision's, with channels last: it begins with a 7 x 7
            convolution and pooling, and computes ReLU in place. Otherwise it is the one for
            32 x 32 pixels (kuangliu/pytorch-cifar), which begins with a 3 x 3 convolution.
    """

    def __init__(self, name: str, norm: Norm, classes: int, *, for_photos: bool) -> None:
        super().__init__()
        self.first = _conv(3, 64, 7, 2) if for_photos else _conv(3, 64, 3)
        self.norm = norm(64)
        self.pool = nn.MaxPool2d(3, 2, 1) if for_photos else nn.Identity()
        self.for_photos = for_photos
        blocks: list[nn.Module] = []
        width = 64
        for stage, count in enumerate(_BLOCKS[name]):
            for block in range(count):
                stride = 2 if stage and not block else 1
                layers = _layers(width, _STAGES[stage], stride, is_deep=name in _DEEP)
                blocks.append(_Residual(layers, norm, for_photos=for_photos))
                width = layers[-1].out_channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, classes)
        if for_photos:
            self.to(memory_format=torch.channels_last)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = _between(self.norm(self.first(x_BCHW)), last=self.for_photos)
        x = self.blocks(self.pool(functional.relu(x, self.for_photos)))
        logits: Tensor = self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def _layers(width: int, inner: int, stride: int, *, is_deep: bool) -> list[nn.Conv2d]:
    if not is_deep:
        return [_conv(width, inner, 3, stride), _conv(inner, inner, 3)]
    return [_conv(width, inner, 1), _conv(inner, inner, 3, stride), _conv(inner, 4 * inner, 1)]


def _stack(
    stages: Iterable[Sequence[int]], after: Callable[[int], Iterable[nn.Module]]
) -> list[nn.Module]:
    """Return convolutions with what follows each, and a pooling at the end of each stage."""
    layers: list[nn.Module] = []
    inputs = 3
    for stage in stages:
        for outputs in stage:
            layers += nn.Conv2d(inputs, outputs, 3, padding=1), *after(outputs)
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return layers


def small_vgg(name: str, norm: Norm, head: nn.Module) -> nn.Module:
    """Return a VGG for images of 32 x 32 (kuangliu/pytorch-cifar), with its head.

    The head gets 512 numbers for each image. The source computes ReLU in place, which Opacus's
    hooks refuse today; what is kept for backward is the same.
    """
    layers = _stack(_VGG[name], lambda channels: (norm(channels), nn.ReLU()))
    return nn.Sequential(*layers, nn.Flatten(), head)


def large_vgg(name: str, classes: int) -> nn.Module:
    """Return torchvision's VGG without norms, for images of any size."""
    layers = _stack(_VGG[name], lambda _: (nn.ReLU(),))
    hidden = 4096
    layers += nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(49 * 512, hidden)
    layers += nn.ReLU(), nn.Dropout(), nn.Linear(hidden, hidden)
    layers += nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes)
    return nn.Sequential(*layers)


def tanh_cnn() -> nn.Module:
    """Return the network of 550,570 parameters on which private training is often compared.

    Source: Tramer and Boneh 2021, "Differentially Private Learning Needs Better Features".
    """
    layers = _stack([(width,) * 2 for width in (32, 64, 128)], lambda _: (nn.Tanh(),))
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(16 * 128, 128), nn.Tanh(), nn.Linear(128, 10)
    )


class _Attention(nn.Module):
    def __init__(self, D: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (D // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.table = nn.Parameter(torch.zeros((2 * side - 1) ** 2 + 3, heads))
        self.register_buffer("places", torch.zeros((side**2 + 1,) * 2, dtype=torch.int64))

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).reshape(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores_BHTT = q * self.scale @ k.transpose(-2, -1)
        of_places = self.table[self.places.view(-1)].view(T, T, -1).permute(2, 0, 1).contiguous()
        weights_BHTT = (scores_BHTT + of_places.unsqueeze(0)).softmax(dim=-1)
        out: Tensor = self.proj((weights_BHTT @ v).transpose(1, 2).reshape(B, T, D))
        return out


class _BeitBlock(nn.Module):
    def __init__(self, D: int, heads: int, side: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = _Attention(D, heads, side)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.gamma_1, self.gamma_2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.gamma_1 * self.attention(self.norm_1(x_BTD))
        return x_BTD + self.gamma_2 * self.mlp(self.norm_2(x_BTD))


class Beit(nn.Module):
    """BEiT as timm had it in 2022: eager attention with a table of relative positions.

    Args:
        size: Height and width of the images.
        D: Width.
        layers: Blocks.
        heads: Of attention.
        classes: How many it tells apart.
        is_private: Whether parameters are frozen that private libraries leave out: those outside of
            linear layers, norms and the convolution.
    """

    def __init__(
        self, size: int, D: int, layers: int, heads: int, classes: int, *, is_private: bool
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, 16, 16)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, D))
        self.blocks = nn.Sequential(*(_BeitBlock(D, heads, size // 16) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, classes)
        frozen = "gamma_", "table", "cls_token"
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not (is_private and any(part in name for part in frozen)))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BTD = self.patches(x_BCHW).flatten(2).transpose(1, 2)
        x_BTD = torch.cat((self.cls_token.expand(len(x_BTD), -1, -1), x_BTD), dim=1)
        logits: Tensor = self.head(self.norm(self.blocks(x_BTD)[:, 1:].mean(1)))
        return logits
