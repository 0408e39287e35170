"""Upper bounds of epsilon: by Opacus's accountants, and by Google's dp-accounting.

Neighbouring data differ in one sample, added or removed; steps are Poisson-sampled Gaussians.
``prv`` composes privacy loss random variables (Gopi et al. 2021), and its bound is at most about
0.01 too high. ``pld`` composes privacy loss distributions on a grid of 1e-4, rounded up (Doroshenko
et al. 2022, "Connect the dots"). ``rdp`` is Renyi differential privacy (Mironov et al. 2019) at
Opacus's orders: the loosest and fastest.
"""

import importlib
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from dpprof.private.accounting.renyi import make_compute_rdp
from dpprof.private.accounting.schedule import Sampling
from dpprof.private.accounting.search import FAILURES, BeyondReachError
from dpprof.private.substitutes import substitute

Steps = tuple[float, float, int]  # noise multiplier, sample rate, and number of steps

_FAR = 200.0
"""Above this epsilon ``rdp`` alone tells it: the others take ever more time and memory, and such an
epsilon protects nobody."""

_EPSILON_ERROR, _DELTA_ERROR = 0.01, 1e-3
"""Opacus's errors of ``prv``: of epsilon, and of delta as a share."""

_PATCHING = threading.Lock()  # one thread at a time gives Opacus's module other sums

_ROUNDING = 100 * 2.0**-52
"""The least delta for each step that ``prv`` and ``pld`` convolve by FFT: below it the rounding of
float64 decides, and what they tell may be too low."""

_MOST_BYTES = 300 * 2**20  # held by ``prv``: with torch below 1 GiB, and a bound takes seconds
_MOST_KINDS = 32  # kinds of steps that ``pld`` composes: each takes about a second


def list_installed() -> list[str]:
    """Return the accountants that there are, the fastest first."""
    return ["rdp", "prv", *(["pld"] if find_spec("dp_accounting") else [])]


def bound_epsilon(
    history: Sequence[Steps], delta: float, accountant: str, sampling: Sampling | None = None
) -> float:
    """Return an upper bound of epsilon, by one accountant alone; infinity where there is none.

    ``history`` are the steps that may draw one sample, in any order. ``BeyondReachError`` says
    why the accountant does not tell it in seconds and within 1 GiB, ``ImportError`` that it is
    not installed.
    """
    if any(noise == 0 for noise, _, _ in history):
        return math.inf
    try:
        if sampling is None or sampling.largest is None:
            return _bound(accountant, history, delta)
        if accountant == "pld":
            sizes = {sampling.drawn_from, max(1, sampling.drawn_from - 1)}  # folds differ by one
            return max(_bound(accountant, history, delta, sampling, size) for size in sizes)
        return _bound_truncated(
            lambda left: _bound(accountant, history, left), history, delta, sampling
        )
    except BeyondReachError:
        raise
    except FAILURES as error:
        why = f"{accountant} fails: {type(error).__name__}: {error}"
        raise BeyondReachError(why[:200]) from None


def _bound(
    accountant: str,
    history: Sequence[Steps],
    delta: float,
    sampling: Sampling | None = None,
    count: int = 0,
) -> float:
    try:
        loose = _bound_by_opacus("rdp", history, delta)
    except ArithmeticError:
        return math.inf  # its numbers are too large for floating point
    if accountant == "rdp" or loose > _FAR:
        return math.inf if count else loose  # which knows nothing of truncation
    convolved = len(history) + sum(
        n for _, rate, n in history if accountant == "prv" or rate < 1 or count
    )
    if delta < _ROUNDING * convolved:
        raise BeyondReachError(
            f"{accountant} rounds by more than a delta of {delta:g} in {convolved:,} steps; rdp "
            "does not"
        )
    if accountant == "pld":
        return float(_compose_pld(tuple(history), sampling, count).get_epsilon(delta))
    _refuse_long(history, delta)
    return _bound_by_opacus(accountant, history, delta)


def _bound_by_opacus(accountant: str, history: Sequence[Steps], delta: float) -> float:
    book = import_opacus().create_accountant(mechanism=accountant)
    book.history = list(history)
    analysis = importlib.import_module("opacus.accountants.analysis.rdp")
    with (
        _PATCHING,
        warnings.catch_warnings(),
        substitute(analysis, "compute_rdp", make_compute_rdp(analysis.compute_rdp)),
    ):
        # That another order might give a tighter bound; and divisions by zero at a sample rate
        # of 1, whose results are not used.
        warnings.simplefilter("ignore")
        if accountant == "rdp" and history:
            spent = sum(_divergences_of_step(noise, rate) * steps for noise, rate, steps in history)
            orders = book.DEFAULT_ALPHAS
            epsilon = float(analysis.get_privacy_spent(orders=orders, rdp=spent, delta=delta)[0])
        else:
            epsilon = float(book.get_epsilon(delta=delta))
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon)


@lru_cache(maxsize=_MOST_KINDS)
def _divergences_of_step(noise: float, rate: float) -> Any:
    """Return the Renyi divergences of one step at Opacus's orders; those of more steps add up."""
    return importlib.import_module("opacus.accountants.analysis.rdp").compute_rdp(
        q=rate, noise_multiplier=noise, steps=1, orders=import_opacus().RDPAccountant.DEFAULT_ALPHAS
    )


def _bound_truncated(
    bound: Callable[[float], float], history: Sequence[Steps], delta: float, sampling: Sampling
) -> float:
    """Return a bound for truncated batches, from that for whole ones.

    Steps are those of Poisson batches but for a probability tau that one is truncated, on either of
    two neighbours. So they are (epsilon, delta' + tau (1 + e^epsilon))-private where the others are
    (epsilon, delta').
    """
    count = sampling.drawn_from
    binom = importlib.import_module("scipy.stats").binom  # slow to import, and seldom needed
    tau = sum(steps * binom.sf(sampling.largest, count, rate) for _, rate, steps in history)
    epsilon = bound(delta)
    while tau and epsilon < _FAR:
        left = delta - tau * (1 + math.exp(epsilon))
        if left <= 0:
            return math.inf
        needed = bound(left)
        if needed <= epsilon:
            return epsilon
        epsilon = needed * (1 + 1e-6) + 1e-9
    return epsilon if not tau else math.inf


def _refuse_long(history: Sequence[Steps], delta: float) -> None:
    """Refuse too much memory for ``prv``: 2 L / h numbers, as in Opacus's ``_get_domain``."""
    counts, error = [steps for *_, steps in history], _DELTA_ERROR * delta
    alone = error / (8 * sum(counts))
    reach = 3 + max(
        _EPSILON_ERROR,
        _bound_by_opacus("rdp", history, error / 4),
        *(_bound_by_opacus("rdp", [(noise, rate, 1)], alone) for noise, rate, _ in history),
    )
    across = math.sqrt(sum(counts) * math.log(12 / error) / 2) / _EPSILON_ERROR
    needed = 2 * reach * across * (56 + 8 * len(history))  # measured bytes of a number
    if not needed <= _MOST_BYTES:
        raise BeyondReachError(
            f"prv needs {needed / 2**30:,.1f} GiB for {sum(counts):,} steps; rdp and pld need less"
        )


@lru_cache(maxsize=1)
def _compose_pld(history: tuple[Steps, ...], sampling: Sampling | None, count: int) -> Any:
    """Compose steps by dp-accounting; batches are truncated where they are kept of a count."""
    accounting = import_dp_accounting()
    if len(history) > _MOST_KINDS:
        raise BeyondReachError(f"pld composes {_MOST_KINDS} kinds of steps, not {len(history):,}")
    book = accounting.pld.PLDAccountant()
    for noise, rate, steps in history:
        event = accounting.GaussianDpEvent(noise)
        if count and sampling is not None:
            event = accounting.TruncatedSubsampledGaussianDpEvent(
                count, rate, sampling.largest, noise
            )
        elif rate < 1:
            event = accounting.PoissonSampledDpEvent(rate, event)
        book.compose(event, steps)
    return book


def import_accountant(accountant: str) -> None:
    """Import what an accountant needs; ``ImportError`` if it is not installed."""
    import_opacus()
    if accountant == "pld":
        import_dp_accounting()


def import_opacus() -> Any:
    """Import Opacus's accountants, which takes as long as PyTorch does (``ImportError``)."""
    try:
        return importlib.import_module("opacus.accountants")
    except ModuleNotFoundError as error:
        raise ImportError(
            "the accountants are Opacus's, which is not installed; give a noise_multiplier, and "
            "account for it elsewhere"
        ) from error


def import_dp_accounting() -> Any:
    """Import Google's dp-accounting; ``ImportError`` if it is not installed."""
    try:
        importlib.import_module("dp_accounting.pld")
        return importlib.import_module("dp_accounting")
    except ModuleNotFoundError as error:
        raise ImportError(
            "the accountant pld needs dp-accounting, which is not installed: pip install "
            "'dpprof[pld]'; or give accountant='prv'"
        ) from error
