"""The models that read images: sizes that are published, and what their layers see."""

import pytest
import torch
from factory import make_experiment
from snapshots import assert_sentences, refusals_of

from dpprof.subjects.models.build import build_model
from dpprof.subjects.models.vision_transformer import VisionTransformerSize

PARAMETERS = {
    "opacus-cnn": 26_010,  # Opacus's MNIST example
    "resnet20-gn": 269_722,  # He et al. 2016, table 6: 0.27 million
    "wrn-16-4": 2_748_890,  # Zagoruyko & Komodakis 2016: 2.7 million
    "wrn-40-4": 8_949_210,  # the same, table 4: 8.9 million
    "resnet50-gn": 25_557_032,  # torchvision's ResNet-50, whose BatchNorm has as many
    "vit-b16": 86_567_656,  # torchvision's ViT-B/16
}


def make(model: str, **fields):
    return make_experiment(model=model, seq_len=None, **fields)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_as_many_parameters_as_published(name) -> None:
    with torch.device("meta"):
        model = build_model(make(name))

    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_images_of_other_sizes_have_logits_too_and_no_sample_sees_another(name) -> None:
    channels, classes = (1, 10) if name == "opacus-cnn" else (3, 5)
    model = build_model(make(name, image_size=48), is_reduced=True).eval()
    x_BCHW = torch.randn(3, channels, 48, 48)
    together = model(x_BCHW)

    assert together.shape == (3, classes)
    torch.testing.assert_close(together[1:2], model(x_BCHW[1:2]))


def test_a_vision_transformer_cuts_patches_as_a_convolution_does() -> None:
    size = VisionTransformerSize(patch=4, d_model=6, layers=1, heads=2, classes=3)
    model = size(make("vit-b16", image_size=12))
    x_BCHW = torch.randn(2, 3, 12, 12)
    kernel = model.patches.weight.view(6, 3, 4, 4)
    expected = torch.nn.functional.conv2d(x_BCHW, kernel, model.patches.bias, 4)

    torch.testing.assert_close(
        model.patches(model._cut(x_BCHW)), expected.flatten(2).transpose(1, 2)
    )


def test_every_attention_lets_a_patch_see_all_others() -> None:
    torch.manual_seed(0)
    size = VisionTransformerSize(patch=4, d_model=6, layers=1, heads=2, classes=3)
    model = size(make("vit-b16", image_size=8))
    x_BCHW = torch.randn(1, 3, 8, 8, requires_grad=True)
    model(x_BCHW).sum().backward()

    # The class token is first, and its logits depend on every patch.
    assert (x_BCHW.grad.view(3, 2, 4, 2, 4).abs().sum((0, 2, 4)) > 0).all()
    eager = size(make("vit-b16", image_size=8, attention="eager"))
    eager.load_state_dict(model.state_dict())
    torch.testing.assert_close(eager(x_BCHW), model(x_BCHW))


def test_what_cannot_be_built_is_told_in_one_sentence() -> None:
    assert_sentences("models/images", refusals_of(lambda **fields: build_model(make(**fields))))


def test_the_smallest_image_of_the_small_network_is_built() -> None:
    assert build_model(make("opacus-cnn", image_size=14))(torch.randn(2, 1, 14, 14)).shape == (
        2,
        10,
    )
