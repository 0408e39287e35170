"""Code paths that make gradients are told from those that find norms."""

import pytest

from dpprof.clipping.engine import CROSSED, MADE, SUMMED
from dpprof.methods.training_step import finds_norms
from dpprof.norms.linear import WAYS
from dpprof.norms.plan import KEPT

MAKE_GRADIENTS = ("grad sampler", "functorch", "expanded weights", KEPT, MADE)


@pytest.mark.parametrize("path", MAKE_GRADIENTS)
def test_what_makes_gradients_finds_no_norms(path) -> None:
    assert not finds_norms(path)


@pytest.mark.parametrize("path", ["norm sampler", SUMMED, CROSSED, *WAYS])
def test_what_finds_norms_makes_no_gradients(path) -> None:
    assert finds_norms(path)
