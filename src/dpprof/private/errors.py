"""What the library raises where nothing in the standard library says it."""

import traceback
from numbers import Integral
from typing import Any


class UnsupportedError(Exception):
    """A combination of valid values that cannot run, here or anywhere; the message says why."""


class BatchAxisError(UnsupportedError, ValueError):
    """The first axis of a layer's input is not the batch."""

    @classmethod
    def of(cls, name: str, samples: int, losses: int, why: str = "") -> "BatchAxisError":
        """Return the error of a layer or parameter that saw another number of samples."""
        return cls(
            f"{name} saw {samples} samples, and there are {losses} losses; the first axis of every "
            "layer's input must be the batch, or the second where batch_second says so, or hold "
            f"rows of each sample, which the graph must show{why and f' ({why})'}; name a module "
            "around it that gets and returns samples in as_one=[...], or freeze it"
        )


def refuse_no_number(name: str, value: Any) -> None:
    """Refuse a setting that is no number, such as a text (``TypeError``)."""
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} must be a number, and is {value!r}")


def is_count(value: Any) -> bool:
    """Tell whether a setting is a whole number of at least 1, such as one of NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def refuse_other_class(name: str, value: Any, wanted: type) -> None:
    """Refuse what is no object of a class of PyTorch (``TypeError``)."""
    if not isinstance(value, wanted):
        what = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be of PyTorch's class {wanted.__name__}, and is {what}")


def is_own(error: BaseException) -> bool:
    """Tell whether dpprof raised an error: others may quote samples, such as a label."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("dpprof.")
