"""A copy of a clipped model is plain, and a state dict fits both."""

import copy
import pickle

import pytest
import torch
from small_models import EVERY, batch, build, private
from torch.optim.swa_utils import AveragedModel

from dpprof.clipping.book_keeping import BookKeeping


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
    assert all(p.grad is None for p in model.parameters())
    way(other, 1.0).remove()
    assert type(model.head).__name__ == "Linear"
    clipping.backward(model.losses(*batch()))


def test_training_goes_on_bitwise_from_a_state_dict_in_any_order() -> None:
    def train(model, steps: int) -> None:
        clipping = BookKeeping(model, 0.5)
        optimizer = private(clipping, model, lr=0.1)
        for _ in range(steps):
            clipping.backward(model.losses(*batch()))
            optimizer.step()
            optimizer.zero_grad()
        clipping.remove()

    through, first, before, after = (build() for _ in range(4))
    train(through, 4)
    train(first, 2)
    before.load_state_dict(first.state_dict())
    train(before, 2)
    clipping = BookKeeping(after, 0.5)
    after.load_state_dict(first.state_dict())
    clipping.remove()
    train(after, 2)

    for resumed in (before, after):
        for one, other in zip(through.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one, other)
