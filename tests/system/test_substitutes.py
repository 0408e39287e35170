"""A replaced attribute is back afterwards, and one that is not there cannot be replaced."""

import pytest

from dpprof.private.substitutes import substitute


class Base:
    name = "inherited"

    @staticmethod
    def call() -> str:
        return "called"


class Derived(Base):
    own = "own"


def test_an_inherited_attribute_is_inherited_again() -> None:
    with substitute(Derived, "name", "replaced"):
        assert (Derived.name, Base.name) == ("replaced", "inherited")

    assert "name" not in vars(Derived)
    assert Derived.name == "inherited"


def replace_and_fail(owner: object) -> None:
    with substitute(owner, "own", "replaced"), substitute(owner, "own", "again"):
        raise KeyError


@pytest.mark.parametrize("owner", [Derived, Derived()])
def test_an_exception_puts_it_back(owner) -> None:
    before = dict(vars(owner))
    with pytest.raises(KeyError):
        replace_and_fail(owner)

    assert dict(vars(owner)) == before
    assert owner.own == "own"


def test_an_attribute_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError, match="renamed"), substitute(Derived, "renamed", 1):
        pass

    assert not hasattr(Derived, "renamed")
