"""What tests of clipping share: the ways of flat clipping, and a seed."""

import pytest
import torch
from small_models import FLAT, each_of

way = each_of(FLAT)
"""A module that clips by layer too, or otherwise, has a ``way`` of its own."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes milliseconds
