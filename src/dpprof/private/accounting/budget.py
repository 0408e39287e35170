"""Finds the noise that keeps a privacy budget, and counts what a training spent of it."""

import copy
import importlib
import math
import uuid
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

from dpprof.private.accounting.schedule import Accountant, Schedule
from dpprof.private.accounting.search import FAILURES, BeyondReachError

if TYPE_CHECKING:
    from dpprof.private.noise.optimizer import NoisyOptimizer

ACCOUNTANTS: tuple[Accountant, ...] = get_args(Accountant)

_FAR = 200.0
"""Above this epsilon ``rdp`` alone tells it: ``prv`` takes ever more time and memory, and such an
epsilon protects nobody."""


_Steps = tuple[float, float, int]
"""Noise multiplier, sample rate, and number of steps."""


def _count(history: Iterable[_Steps]) -> int:
    return sum(steps for _, _, steps in history)


def _beyond(history: Iterable[_Steps], saved: Iterable[_Steps]) -> list[_Steps]:
    """Return the steps of a history that come after those that were saved of it."""
    done, beyond = _count(saved), []
    for noise, rate, steps in history:
        left = max(0, steps - done)
        done -= steps - left
        if left:
            beyond.append((noise, rate, left))
    return beyond


class Spent:
    """Counts steps, and tells what they spent.

    Args:
        sample_rate: The probability with which a step draws each sample.
        delta: The delta of the guarantee; None where it is given later.
        accountant: One of ``ACCOUNTANTS``.
    """

    def __init__(self, sample_rate: float, delta: float | None, accountant: str) -> None:
        self.sample_rate, self.delta, self.accountant = sample_rate, delta, accountant
        self.training = uuid.uuid4().hex
        """Names this training among those that are counted together."""

        self.histories: dict[str, list[_Steps]] = {self.training: []}
        """The steps of each training; trainings that are counted together share the dictionary."""

    @property
    def history(self) -> list[_Steps]:
        """Noise multiplier, sample rate and number of steps, of one training after another.

        Opacus's accountants take such a list.
        """
        return [steps for each in self.histories.values() for steps in each]

    @history.setter
    def history(self, own: Iterable[_Steps]) -> None:
        self.histories[self.training][:] = own

    @property
    def steps(self) -> int:
        """How many steps were counted."""
        return _count(self.history)

    def continue_with(self, other: "Spent") -> None:
        """Let another training, on the same samples, count its steps together with this one's.

        Raises:
            ValueError: The other has another accountant or delta.
        """
        for name in ("accountant", "delta"):
            own, new = getattr(self, name), getattr(other, name)
            if own != new:
                raise ValueError(f"what was spent has {name} {own!r}, and this training {new!r}")
        self.histories |= other.histories
        other.histories = self.histories

    def state_dict(self) -> dict[str, Any]:
        """Return what this training spent, and those that are counted together with it."""
        return {"training": self.training, "histories": copy.deepcopy(self.histories)}

    def load_state_dict(self, state: dict[str, Any], *, exact: bool = False) -> None:
        """Go on from a saved state; no step is forgotten.

        Steps that this process took after the state was saved stay counted, as a training of their
        own. With ``exact`` they do not: they are taken again, and release the same.
        """
        training, histories = state["training"], state["histories"]
        own = self.histories.pop(self.training)
        if training == self.training:
            beyond = [] if exact else _beyond(own, histories[training])
            self.histories |= {uuid.uuid4().hex: beyond} if beyond else {}
        elif own:
            self.histories[self.training] = own
        self.training = training
        for name, saved in histories.items():
            counted = self.histories.setdefault(name, [])
            if name == training or _count(saved) > _count(counted):
                counted[:] = [(noise, rate, steps) for noise, rate, steps in saved]

    def count(self, optimizer: "NoisyOptimizer") -> None:
        """Count a step, which an optimizer is about to take."""
        own, spent = self.histories[self.training], (optimizer.noise_multiplier, self.sample_rate)
        steps = own.pop()[2] if own and own[-1][:2] == spent else 0
        own.append((*spent, steps + 1))

    def refuse_beyond(self, noise_multiplier: float, sample_rate: float, planned: int) -> None:
        """Refuse a plan into which the counted steps do not fit.

        Raises:
            ValueError: A step had less noise or a higher rate, or all planned steps are done.
        """
        if any(noise < noise_multiplier or rate > sample_rate for noise, rate, _ in self.history):
            raise ValueError(
                f"what was spent has steps with less noise than {noise_multiplier:g}, or a higher "
                f"sample rate than {sample_rate:g}: plan all rounds with one epsilon, one number "
                "of steps and one sample rate, or give noise_multiplier"
            )
        if self.steps >= planned:
            raise ValueError(
                f"the privacy budget is spent: {self.steps:,} of {planned:,} steps are done"
            )

    def epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon of all steps so far, by Opacus's accountant.

        Where ``prv`` fails, as at a delta of 1e-15, it is the bound by ``rdp``, which is higher.

        Args:
            delta: The delta; None for that of the plan.

        Raises:
            ValueError: No delta is known, or it is out of its range, or the accountant fails.
            ImportError: Opacus is not installed.
        """
        delta = self.delta if delta is None else delta
        if delta is None:
            raise ValueError("epsilon needs a delta, and none was given for this training")
        _verify_delta(delta)
        if not self.history:
            return 0.0
        if any(noise == 0 for noise, _, _ in self.history):
            return math.inf
        try:
            bound = self._account("rdp", delta)
        except ArithmeticError:
            return math.inf  # its numbers are too large for floating point
        except FAILURES as error:
            raise ValueError(
                f"rdp computes no epsilon at delta {delta:g} for steps of (noise multiplier, "
                f"sample rate, number) {self.history[:3]}: {type(error).__name__}: {error}"
            ) from error
        if self.accountant == "rdp" or bound > _FAR:
            return bound
        try:
            return self._account("prv", delta)
        except FAILURES:
            return bound

    def _account(self, accountant: str, delta: float) -> float:
        """Return an upper bound of epsilon, by one of Opacus's accountants."""
        book = import_opacus().create_accountant(mechanism=accountant)
        book.history = list(self.history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that other orders might give a tighter bound
            epsilon = float(book.get_epsilon(delta=delta))
        return math.inf if math.isnan(epsilon) else max(0.0, epsilon)


def verify_budget(
    noise_multiplier: float | None, epsilon: float | None, delta: float | None, *, accountant: str
) -> None:
    """Verify that the arguments say how much noise there is.

    Raises:
        ValueError: They do not, or a number is out of its range.
    """
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {accountant!r}")
    if (noise_multiplier is None) == (epsilon is None):
        raise ValueError("give either noise_multiplier or epsilon")
    if epsilon is not None and delta is None:
        raise ValueError("epsilon needs a delta, less than one over the number of samples")
    if epsilon is not None and not epsilon > 0:
        raise ValueError(f"epsilon must be positive, and is {epsilon}")
    if delta is not None:
        _verify_delta(delta)


def _verify_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, and is {delta}")


def warn_of_delta(delta: float | None, samples: int) -> None:
    """Warn of a delta that protects no single sample."""
    if delta is not None and delta >= 1 / samples:
        warnings.warn(
            f"delta {delta:g} is at least 1/{samples:,}, one over the number of samples: it allows "
            "that some sample is published as it is",
            stacklevel=3,
        )


def find_noise(epsilon: float, delta: float, steps: int, rate: float, accountant: str) -> float:
    """Find the least noise multiplier that keeps a budget.

    Args:
        epsilon: The budget.
        delta: The delta of the guarantee.
        steps: How many steps are planned.
        rate: The probability with which each step draws a sample.
        accountant: One of ``ACCOUNTANTS``.

    Raises:
        ImportError: Opacus is not installed.
        BeyondReachError: No noise multiplier keeps it.
    """
    import_opacus()
    from dpprof.private.accounting.noise_multiplier import (  # noqa: PLC0415 (it imports Opacus)
        find_noise_multiplier,
    )

    size, samples = rate.as_integer_ratio()  # so many of so many samples: the same rate
    of = Schedule(samples, size, steps)
    try:
        multiplier: float = find_noise_multiplier(of, epsilon, delta, accountant)
    except BeyondReachError as error:
        raise BeyondReachError(
            f"no noise multiplier keeps epsilon {epsilon:g} at delta {delta:g} for {steps:,} steps "
            f"that draw each sample with probability {rate:.3g}, by {accountant}"
            + ("; accountant='rdp' may reach a smaller delta" if accountant == "prv" else "")
        ) from error
    return multiplier


def import_opacus() -> Any:
    """Import Opacus's accountants, which takes as long as PyTorch does.

    Raises:
        ImportError: Opacus is not installed.
    """
    try:
        return importlib.import_module("opacus.accountants")
    except ModuleNotFoundError as error:
        raise ImportError(
            "the accountants are Opacus's, which is not installed; give a noise_multiplier, and "
            "account for it elsewhere"
        ) from error
