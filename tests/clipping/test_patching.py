"""A copy of a clipped model is plain, and a state dict fits both."""

import copy
import pickle

import pytest
import torch
from small_models import EVERY, batch, build, is_clear
from torch.optim.swa_utils import AveragedModel

from dpprof.private.engine.book_keeping import BookKeeping


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("make", ["deepcopy", "pickle", "average"])
def test_a_copy_is_a_plain_model_with_weights_of_its_own(make, way) -> None:
    model = build("no rule")
    clipping = way(model, 1.0)
    if make == "deepcopy":
        other = copy.deepcopy(model)
    elif make == "pickle":
        other = pickle.loads(pickle.dumps(model))  # noqa: S301 (our own)
    else:
        other = AveragedModel(model).module
    expected = model.losses(*batch()).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)

    assert torch.allclose(other.losses(*batch()), expected, rtol=1e-12)
    assert type(other.body) is type(build("no rule").body)
    other.losses(*batch()).sum().backward()  # nobody clips it
    assert all(p.grad is not None for p in other.parameters())
    assert is_clear(model)
    way(other, 1.0).remove()
    assert type(model.head).__name__ == "Linear"
    clipping.backward(model.losses(*batch()))


def test_a_state_dict_fits_a_model_with_and_without_a_clipping() -> None:
    plain, clipped = build(), build("layer norm")
    before = plain.state_dict()
    clipping = BookKeeping(clipped, 0.5)
    clipped.load_state_dict(before)
    plain.load_state_dict(clipped.state_dict())
    assert list(clipped.state_dict()) == list(before)
    clipping.backward(clipped.losses(*batch()))
    clipping.remove()
    assert list(clipped.state_dict()) == list(before)
