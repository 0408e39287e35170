"""Finds the noise that keeps a privacy budget, and counts what a training spent of it."""

import copy
import math
import os
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from dpprof.private.accounting.accountants import (
    Steps,
    bound_epsilon,
    import_accountant,
    list_installed,
)
from dpprof.private.accounting.noise_multiplier import find_for_sampling
from dpprof.private.accounting.schedule import Accountant, Sampling
from dpprof.private.accounting.search import BeyondReachError
from dpprof.private.errors import refuse_no_number

if TYPE_CHECKING:
    from dpprof.private.noise.optimizer import NoisyOptimizer

ACCOUNTANTS: tuple[Accountant, ...] = get_args(Accountant)

_SAMPLING = ("folds", "truncated_batch_size (of a rank)", "samples (of a fold on a rank)", "unit")
"""How a step draws, beside its rate."""

_DELTAS = [10.0**-power for power in range(1, 13)]  # at which a trade-off curve asks for epsilon
_FAR = 200.0  # an epsilon that bounds no rate


_ROUNDING = 1e-12  # of a noise multiplier that is computed from others


def _count(history: Iterable[Steps]) -> int:
    return sum(steps for _, _, steps in history)


class Plan(NamedTuple):
    """What keeps an epsilon."""

    epsilon: float
    delta: float
    noise_multiplier: float  # of each step, as it is counted
    turns: int  # the most steps that may draw one sample


class Spent:
    """Counts steps, and tells what they spent.

    Args:
        sampling: How a step draws samples.
        delta: The delta of the guarantee; None where it is given later.
        accountant: One of ``ACCOUNTANTS``.
    """

    def __init__(self, sampling: Sampling, delta: float | None, accountant: str) -> None:
        self.sampling, self.delta, self.accountant = sampling, delta, accountant
        self.training = uuid.uuid4().hex
        """Names this training among those that are counted together."""

        self.plan: Plan | None = None
        """Of this training; None where it has no epsilon to keep."""

        self._fits: Counter[tuple[float, float]] = Counter()  # what last fitted, with the rest
        self._process = os.getpid()

        self.histories: dict[str, list[Steps]] = {self.training: []}
        """The steps of each training; trainings that are counted together share the dictionary.

        After a load, or a fork, steps are under a name of their own behind the training's, so that
        a name has the steps of one line; those of folds but the first, under its number too.
        """

        self.reached: dict[str, int] = {}
        """The most steps that an optimizer of each training took; shared likewise."""

    @property
    def history(self) -> list[Steps]:
        """Noise multiplier, sample rate and number of steps, of one training after another.

        Opacus's accountants take such a list. With folds no sample was drawn in more steps than
        these: of each training and kind of steps, those of the fold that has the most.
        """
        trainings = dict.fromkeys(map(training_of, self.histories))
        return [steps for training in trainings for steps in self._list_most(training)]

    @history.setter
    def history(self, own: Iterable[Steps]) -> None:
        self.histories[self.training] = list(own)

    def _list_most(self, training: str) -> list[Steps]:
        own = {n: steps for n, steps in self.histories.items() if training_of(n) == training}
        if len(own) == 1:
            return next(iter(own.values()))
        most: dict[tuple[float, float], int] = {}
        for fold in dict.fromkeys(name.partition("/")[2] for name in own):
            for kind, steps in self._count_kinds(training, fold).items():
                most[kind] = max(most.get(kind, 0), steps)
        return [(noise, rate, steps) for (noise, rate), steps in most.items()]

    def _count_kinds(self, training: str, fold: str) -> Counter[tuple[float, float]]:
        """Count the steps of a fold by noise multiplier and rate."""
        kinds: Counter[tuple[float, float]] = Counter()
        for name, own in self.histories.items():
            if training_of(name) == training and name.partition("/")[2] == fold:
                for noise, rate, steps in own:
                    kinds[noise, rate] += steps
        return kinds

    @property
    def steps(self) -> int:
        """How many steps were counted."""
        return sum(map(_count, self.histories.values()))

    def continue_with(self, other: "Spent") -> None:
        """Let another training, on the same samples, count its steps together with this one's.

        Raises:
            ValueError: The other has another accountant, delta, truncation or unit.
        """
        compared = {
            "accountant": (self.accountant, other.accountant),
            "delta": (self.delta, other.delta),
            "truncated_batch_size, of so many samples,": (
                *(spent.sampling[2:4] for spent in (self, other)),
            ),
            "unit": (self.sampling.unit, other.sampling.unit),
        }
        for name, (own, new) in compared.items():
            if own != new:
                raise ValueError(f"what was spent has {name} {own!r}, and this training {new!r}")
        self.histories |= other.histories
        other.histories = self.histories
        self.reached |= other.reached
        other.reached = self.reached

    def state_dict(self) -> dict[str, Any]:
        """Return what this training spent, and those that are counted together with it."""
        return {
            "training": self.training,
            "histories": copy.deepcopy(self.histories),
            "reached": dict(self.reached),
            "sampling": self.sampling[1:],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; no step is forgotten.

        Steps that this process took after the state was saved stay counted, also where they are
        taken again: with another rate, say, they release something else.

        Raises:
            ValueError: The saved steps have other folds or units, or truncated batches otherwise.
        """
        training, histories = state["training"], state["histories"]
        for name, then, now in zip(_SAMPLING, state["sampling"], self.sampling[1:], strict=True):
            if then != now and any(histories.values()):
                raise ValueError(f"what was spent has {name} {then}, and this training {now}")
        for name, saved in histories.items():
            counted = self.histories.setdefault(name, [])
            if _count(saved) > _count(counted):
                counted[:] = [(noise, rate, steps) for noise, rate, steps in saved]
        for name, steps in state["reached"].items():
            self.reached[name] = max(steps, self.reached.get(name, 0))
        self.training, self._process = _name_line(training), os.getpid()

    def count(self, optimizer: "NoisyOptimizer", fold: int = 0) -> None:
        """Count a step, which an optimizer is about to take on samples of a fold."""
        if os.getpid() != self._process:  # the other process goes on under the name of before
            self.training, self._process = _name_line(self.training), os.getpid()
        own = self.histories.setdefault(self.training + (f"/{fold}" if fold else ""), [])
        kind = optimizer.counted_noise_multiplier, self.sampling.rate
        if own and own[-1][:2] == kind:
            own[-1] = (*kind, own[-1][2] + 1)  # never fewer, wherever this is interrupted
        else:
            own.append((*kind, 1))

    def count_turns_after(self, optimizer: "NoisyOptimizer", fold: int) -> int:
        """Count the most steps that may draw one sample, once another step of a fold is counted."""
        kind = optimizer.counted_noise_multiplier, self.sampling.rate
        training = training_of(self.training)
        own = self._count_kinds(training, str(fold or ""))[kind]
        most = _count(steps for steps in self._list_most(training) if steps[:2] == kind)
        return _count(self.history) + (own == most)

    def find_noise(self, epsilon: float, planned: int) -> float:
        """Plan so many steps: return the least noise multiplier with which they keep a budget.

        Raises:
            ValueError: As of the function ``find_noise``; or the counted steps do not fit in.
        """
        assert self.delta is not None
        noise = find_noise(epsilon, self.delta, planned, self.sampling, self.accountant)
        self.plan = Plan(epsilon, self.delta, noise, self.sampling.count_turns(planned))
        if _count(self.history) >= self.plan.turns:
            raise ValueError(
                f"the privacy budget is spent: {self.steps:,} of {planned:,} steps are done"
            )
        if why := self.find_excess():
            raise ValueError(why)
        return noise

    def find_excess(self) -> str:
        """Say why the counted steps and the rest of the plan spend too much; "" if they do not.

        An accountant is asked only where other steps than planned were counted, and once for each
        such history.

        Raises:
            ValueError: It does not tell.
        """
        if self.plan is None:
            return ""
        epsilon, delta, least, turns = self.plan
        rate, history = self.sampling.rate, self.history
        left = turns - _count(history)
        least_counted = least * (1 - _ROUNDING)
        if left >= 0 and all(n >= least_counted and drawn <= rate for n, drawn, _ in history):
            return ""
        whole = Counter({(least, rate): max(0, left)})
        for noise, drawn, steps in history:
            whole[noise, drawn] += steps
        if whole != self._fits:
            steps_of_kinds = [(*kind, steps) for kind, steps in whole.items() if steps]
            if _bound(steps_of_kinds, delta, self.accountant, self.sampling) > epsilon:
                return (
                    f"what was spent has steps with less noise than {least:g}, a higher sample "
                    f"rate than {rate:g}, or more steps than planned, and with {max(0, left):,} "
                    f"more it is above epsilon {epsilon:g}: plan all rounds with one epsilon, one "
                    "number of steps and one sample rate, or give noise_multiplier"
                )
            self._fits = whole
        return ""

    def epsilon(self, delta: float | None = None) -> float:
        """Return an upper bound of the epsilon of all steps so far.

        It is the least by the accountant, or by ``rdp`` where that fails; ``tightest`` asks all.

        Args:
            delta: The delta; None for that of the plan.

        Raises:
            ValueError: No delta is known, or it is out of its range, or the accountants fail.
            ImportError: The accountant is not installed.
        """
        delta = self.delta if delta is None else delta
        if delta is None:
            raise ValueError("epsilon needs a delta, and none was given for this training")
        _verify_delta(delta)
        history = self.history
        return _bound(history, delta, self.accountant, self.sampling) if _count(history) else 0.0

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Return an upper bound of how often an attack tells that a sample was trained on.

        It is the trade-off curve (Dong et al. 2022, "Gaussian differential privacy") under the
        guarantees at all deltas: nobody who sees what all steps released, and takes samples for
        trained on that are not at a false positive rate a, is right more often than the least of
        e^epsilon a + delta and 1 - e^-epsilon (1 - delta - a).

        Args:
            false_positive_rate: From 0 to 1.

        Raises:
            ValueError: It is not; or as of ``epsilon``.

        Example:
            >>> from dpprof.private.accounting.budget import Spent
            >>> from dpprof.private.accounting.schedule import Sampling
            >>> spent = Spent(Sampling(0.01), 1e-5, "rdp")
            >>> spent.history = [(1.0, 0.01, 100)]
            >>> round(spent.true_positive_rate(0.01), 3)
            0.022
        """
        if not 0 <= false_positive_rate <= 1:
            raise ValueError(
                f"false_positive_rate must lie between 0 and 1, and is {false_positive_rate}"
            )
        rate = 1.0
        for delta in _DELTAS:
            epsilon = self.epsilon(delta)
            if epsilon < _FAR:
                few = math.exp(epsilon) * false_positive_rate + delta
                rate = min(rate, few, 1 - math.exp(-epsilon) * (1 - delta - false_positive_rate))
        return max(rate, false_positive_rate)


def _bound(history: list[Steps], delta: float, by: str, sampling: Sampling) -> float:
    """Bound the epsilon of a history as ``Spent.epsilon`` does."""
    asked = list_installed() if by == "tightest" else [by, "rdp"]
    bounds = []
    for accountant in dict.fromkeys(asked):
        try:
            bounds.append(bound_epsilon(history, delta, accountant, sampling))
        except BeyondReachError as error:
            failure = error
        if bounds and by != "tightest":
            break
    if not bounds:
        raise ValueError(
            f"{failure} (no epsilon at delta {delta:g} for steps of (noise multiplier, sample "
            f"rate, number) {history[:3]})"
        )
    return min(bounds)


def _name_line(training: str) -> str:
    return f"{training_of(training)}:{uuid.uuid4().hex}"


def training_of(name: str) -> str:
    """Return the training of which a name has steps."""
    return name.partition("/")[0].partition(":")[0]


def verify_budget(
    noise_multiplier: float | None, epsilon: float | None, delta: float | None, *, accountant: str
) -> None:
    """Verify that the arguments say how much noise there is (``ValueError``)."""
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {accountant!r}")
    if (noise_multiplier is None) == (epsilon is None):
        raise ValueError("give either noise_multiplier or epsilon")
    if epsilon is not None and delta is None:
        raise ValueError("epsilon needs a delta, less than one over the number of samples")
    if epsilon is not None:
        refuse_no_number("epsilon", epsilon)
        if not 0 < epsilon < math.inf:
            raise ValueError(f"epsilon must be positive and finite, and is {epsilon}")
    if delta is not None:
        _verify_delta(delta)


def _verify_delta(delta: float) -> None:
    refuse_no_number("delta", delta)
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, and is {delta}")


def warn_of_delta(delta: float | None, count: int, unit: str = "sample") -> None:
    """Warn of a delta that protects no single sample, or other unit, of so many."""
    if delta is not None and delta >= 1 / count:
        warnings.warn(
            f"delta {delta:g} is at least 1/{count:,}, one over the number of {unit}s: it allows "
            f"that some {unit} is published as it is",
            stacklevel=3,
        )


def find_noise(
    epsilon: float, delta: float, steps: int, sampling: Sampling, accountant: str
) -> float:
    """Find the least noise multiplier that keeps a budget over steps (``BeyondReachError``)."""
    import_accountant(accountant)
    try:
        return find_for_sampling(sampling, steps, epsilon, delta, accountant)
    except BeyondReachError as error:
        raise BeyondReachError(
            f"no noise multiplier keeps epsilon {epsilon:g} at delta {delta:g} for {steps:,} steps "
            f"that draw each sample with probability {sampling.rate:.3g}, by {accountant}: {error}"
        ) from error
