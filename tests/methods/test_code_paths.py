"""Code paths that make gradients are told from those that find norms; others are refused."""

import pytest

from dpprof.private.norms.code_paths import CodePath, Way, finds_norms
from dpprof.private.norms.linear import WAYS
from dpprof.subjects.methods.opacus.opacus_paths import OpacusPath

MAKE_GRADIENTS = (
    *(OpacusPath.GRAD_SAMPLER, OpacusPath.FUNCTORCH, OpacusPath.EXPANDED_WEIGHTS),
    *(Way.KEPT, Way.DIRECT),
)
FIND_NORMS = (OpacusPath.NORM_SAMPLER, Way.SUMMED, Way.CROSSED, *WAYS)


def test_every_way_makes_gradients_or_finds_norms() -> None:
    assert {path for path in (*OpacusPath, *Way) if finds_norms(path)} == set(FIND_NORMS)
    assert {*MAKE_GRADIENTS, *FIND_NORMS} == {*OpacusPath, *Way}


def test_another_package_names_ways_of_its_own() -> None:
    class Mine(CodePath):
        SORTED = "sorted rows", "norms"

    assert finds_norms(Mine.SORTED)
    assert f"{Mine.SORTED}" == "sorted rows"


@pytest.mark.parametrize("name", ["norm sampler", "functorch", "no such way"])
def test_a_plain_name_is_an_error(name) -> None:
    with pytest.raises(TypeError, match=f"the code path '{name}' does not say what it makes"):
        finds_norms(name)


def test_a_way_that_makes_neither_is_an_error() -> None:
    with pytest.raises(ValueError, match="'sums' must make one of"):

        class Wrong(CodePath):
            SUMS = "sums", "sums"
