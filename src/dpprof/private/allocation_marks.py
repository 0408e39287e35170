"""Functions that allocate for a component, marked at the function itself.

A storage belongs to the component of the innermost function that was under way when it was
allocated. Functions are recognised by their code, not by a name, so renaming or moving one
cannot lose what it allocates.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # clipping marks functions too, and needs nothing else of results
    from dpprof.experiments.records.terms import Component

Function = Callable[..., Any]
_F = TypeVar("_F", bound=Function)

MARKED: "dict[Function, Component]" = {}  # every marked function so far, with its component


def allocates(component: "Component") -> Callable[[_F], _F]:
    """Mark a function: what is allocated in its own code belongs to a component.

    What functions that it calls allocate is theirs, unless they allocate for their caller.

    Args:
        component: To whom it belongs, whatever the method.
    """

    def mark(function: _F) -> _F:
        MARKED[function] = component
        return function

    return mark


HELPERS: set[CodeType] = set()  # the code of every function that allocates for whoever calls it


def allocates_for_its_caller(function: _F) -> _F:
    """Mark a helper: what is allocated in its code counts as allocated by its caller."""
    HELPERS.update(codes_of(function))
    return function


def components_by_code(births: "Mapping[Function, Component]") -> "dict[CodeType, Component]":
    """List the code of marked functions, and of a method's own ``births``, which come first."""
    return {
        code: component
        for function, component in (MARKED | dict(births)).items()
        for code in codes_of(function)
    }


def codes_of(function: Function) -> Iterator[CodeType]:
    """Find a function's code, and that of all functions and comprehensions written in it."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if not isinstance(code, CodeType):
        raise TypeError(
            f"births must name functions written in Python, by the function itself, and "
            f"{function!r} is none"
        )
    waiting = [code]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += [one for one in found.co_consts if isinstance(one, CodeType)]
