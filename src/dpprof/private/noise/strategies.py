"""The algebra of correlated noise: what is subtracted of earlier noise, and what that is worth.

Steps release ``G + C^-1 Z``: row t of G is the clipped sum of step t, rows of Z are independent
Gaussian noise, and C, the strategy, is a lower triangle whose diagonals are constant (Toeplitz).
A later step takes back a part of what earlier ones added, so sums over steps, which is what SGD's
parameters are, have less noise. To see it is to see ``C G + Z``: a Gaussian mechanism whose
sensitivity is C's times the bound of a sample.

How samples take part decides that sensitivity. With f folds a sample takes part at most once in any
f consecutive steps.

* ``banded`` (BandMF; Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization"): C has
  b bands, b <= f. What a sample adds in two steps then lies in different rows, so each
  participation is a Gaussian mechanism of its own, of the sensitivity of one column, which is 1
  here; if the sample was drawn for that step by a probability, a subsampled one.
* ``bisr`` (banded inverse square root; Kalinin et al. 2025, arXiv 2505.12128): C^-1 has the first
  b coefficients of (1 - x)^(1/2), and C has as many rows as there are steps. What a sample adds
  overlaps, so all its participations are one Gaussian mechanism, without sampling; C^-1 is scaled
  so that its sensitivity is 1.

One band is independent noise. Polynomials stand for Toeplitz matrices: the product of two is the
product of their coefficients, and C^-1 are those of 1 / c(x).
"""

import importlib
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpprof.private.errors import is_count

Coefficients = NDArray[np.float64]  # first column of a Toeplitz lower triangle

NOISES = ("banded", "bisr")


class Strategy(NamedTuple):
    """How the noise of steps is correlated (``make_strategy``)."""

    noise: str  # one of ``NOISES``
    bands: int
    steps: int  # how many steps it is for; no step may follow them
    folds: int  # in so many consecutive steps a sample takes part at most once; at least ``bands``
    coefficients: tuple[float, ...]
    """The ``bands`` first coefficients of C for ``banded``, and of C^-1 for ``bisr``, scaled so
    that the sensitivity is 1."""

    def describe(self) -> str:
        """Describe the strategy, for a state: all but its coefficients, which may be rounded."""
        return f"{self.noise} of {self.bands} bands, {self.steps} steps and {self.folds} folds"

    @property
    def is_sampled(self) -> bool:
        """Whether each participation of a sample is a mechanism of its own, which may be sampled.

        Otherwise all steps from a beginning on are one Gaussian mechanism.
        """
        return self.noise == "banded"

    @property
    def scale(self) -> float:
        """The standard deviation of draws, over that of independent noise."""
        first = self.coefficients[0]
        return 1 / first if self.is_sampled else first

    @property
    def weights(self) -> tuple[float, ...]:
        """What a step's noise has beside its draw: of the last ``bands - 1`` steps, newest first.

        These are weights of their noise for ``banded``, and of their draws for ``bisr``.
        """
        first, *others = self.coefficients
        return tuple((-other if self.is_sampled else other) / first for other in others)


class NoiseErrors(NamedTuple):
    """Root mean squares over all steps of noise, over independent noise in one step."""

    step: float  # of the noise of a step
    training: float  # of the sum over all steps so far, as the optimizer weighs it


def make_strategy(noise: str, *, steps: int, bands: int, folds: int | None = None) -> Strategy:
    """Make the strategy of a training.

    Args:
        noise: ``banded``, whose coefficients are optimised for the root mean square error of the
            sums over steps; or ``bisr``.
        steps: How many steps the training has.
        bands: How many; ``bands - 1`` tensors of the parameters' size are kept.
        folds: In so many consecutive steps a sample takes part at most once; by default ``bands``.

    Raises:
        ValueError: A number is out of its range, or there are more bands than folds.

    Formal guarantees: where samples take part as ``folds`` says, ``C G`` moves by at most the bound
    of a sample: for each participation with ``banded``, in rows that no other one moves, and for
    all together with ``bisr``.

    Example:
        >>> from dpprof.private import make_strategy
        >>> strategy = make_strategy("banded", steps=100, bands=2)
        >>> [round(number, 3) for number in strategy.coefficients]
        [0.796, 0.606]
    """
    if noise not in NOISES:
        raise ValueError(f"noise must be one of {', '.join(NOISES)}, and is {noise!r}")
    folds = bands if folds is None else folds
    for name, number in (("steps", steps), ("bands", bands), ("folds", folds)):
        if not is_count(number):
            raise ValueError(f"{name} must be a whole number, at least 1, and is {number!r}")
    steps, bands, folds = map(int, (steps, bands, folds))
    if bands > steps:
        raise ValueError(f"{bands} bands are more than the {steps} steps of the training")
    if folds < bands:
        raise ValueError(
            f"{bands} bands need samples that take part at most once in any {bands} consecutive "
            f"steps, and here that holds for {folds} (folds): draw batches from at least {bands} "
            "folds of the data in turn, or take fewer bands"
        )
    if noise == "banded":
        made = _optimise(steps, bands)
    else:
        inverse = inverse_root(bands)
        made = inverse * find_sensitivity(_filter(np.eye(1, steps)[0], inverse), folds)
    return Strategy(noise, bands, steps, folds, tuple(made.tolist()))


def is_correlated_noise(noise: str, bands: int) -> bool:
    """Tell whether noise is correlated, or independent (``ValueError`` for other noise)."""
    every = ("independent", *NOISES)
    if noise not in every:
        raise ValueError(f"noise must be one of {', '.join(every)}, and is {noise!r}")
    if noise == "independent" and bands != 1:
        raise ValueError(
            f"independent noise has one band, and bands is {bands}; give noise='banded' or 'bisr'"
        )
    return noise in NOISES


def inverse_root(bands: int) -> Coefficients:
    """Return the first coefficients of (1 - x)^(1/2)."""
    k = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((k - 1.5) / k)])


def find_sensitivity(column: Coefficients, folds: int) -> float:
    """Find how far one sample of bound 1 moves ``C G`` (L2), taking part every so many steps.

    The first ``column`` of C has one number for each step, not negative, and none larger than the
    one before (``ValueError``): then the most that any sample can do is to take part as often as it
    may, from the first step on (Kalinin and Lampert 2024, arXiv 2405.13763, theorem 2).
    """
    rises = np.diff(column, prepend=column[:1]).max() > 1e-12 * column[0]
    if column.min() < 0 or rises:
        raise ValueError("the sensitivity is known for columns that fall, and stay at least 0")
    rows = np.pad(column, (0, -len(column) % folds)).reshape(-1, folds)
    return float(np.linalg.norm(np.cumsum(rows, axis=0).ravel()[: len(column)]))


def find_errors(strategy: Strategy, *, momentum: float = 0.0) -> NoiseErrors:
    """Find how much noise a strategy leaves, in a step and in the parameters of SGD.

    Noise is relative to ``noise_multiplier * max_grad_norm / expected_batch_size``, which differs
    between ``banded`` and ``bisr`` for the same epsilon. An adaptive optimizer such as AdamW
    divides by what it saw before, so for it the error of the parameters is a hint, and that of a
    step what it reads.

    Args:
        strategy: As of ``make_strategy``; one band is independent noise.
        momentum: Of SGD; 0 for none. The learning rate is constant, and 1.

    Raises:
        ValueError: The momentum is out of its range.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, and is {momentum}")
    noise = np.eye(1, strategy.steps)[0]
    if strategy.is_sampled:
        noise = _filter(noise, np.array(strategy.coefficients))
    else:
        noise[: strategy.bands] = strategy.coefficients
    parameters = np.cumsum(_filter(noise, np.array([1.0, -momentum])))
    rows = np.arange(strategy.steps, 0, -1) / strategy.steps  # in which a coefficient stands
    return NoiseErrors(*(math.sqrt(rows @ np.square(each)) for each in (noise, parameters)))


def _filter(column: Coefficients, divisor: Coefficients) -> Coefficients:
    signal: Any = importlib.import_module("scipy.signal")  # slow to import, and seldom needed
    quotient: Coefficients = signal.lfilter([1.0], divisor, column)
    return quotient


def _optimise(steps: int, bands: int) -> Coefficients:
    """Return the coefficients of C, of norm 1, with the least mean square error of sums over steps.

    It is minimised by L-BFGS from the inverse square root's, with its exact gradient: b = 1 / (c(x)
    (1 - x)) has the derivative -x^k b / c(x) by coefficient k. A million steps take 20 s.
    """
    weights = np.arange(steps, 0, -1) / steps
    ones = np.ones(steps)

    def measure(c: Coefficients) -> tuple[float, Coefficients]:
        """Return the logarithm of squared norm times squared error, and its gradient."""
        with np.errstate(over="ignore", invalid="ignore"):
            b = _filter(ones, c)
            weighted, moved = weights * b, _filter(b, c)
            error, norm = float(weighted @ b), float(c @ c)
        if not math.isfinite(error + float(np.abs(moved).max())):
            return math.inf, np.zeros(bands)
        of_error = np.array([-2 * weighted[k:] @ moved[: steps - k] for k in range(bands)])
        return math.log(error * norm), of_error / error + 2 * c / norm

    optimize: Any = importlib.import_module("scipy.optimize")
    options = {"maxiter": 1000, "maxcor": 30, "ftol": 1e-14, "gtol": 1e-9}
    best: Coefficients = optimize.minimize(
        measure,
        np.concatenate([[1.0], np.cumprod((np.arange(1, bands) - 0.5) / np.arange(1, bands))]),
        jac=True,
        method="L-BFGS-B",
        options=options,
    ).x
    normed: Coefficients = best * np.sign(best[0]) / np.linalg.norm(best)
    return normed
