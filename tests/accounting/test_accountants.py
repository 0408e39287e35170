"""Each accountant's epsilon against the others', at lengths and deltas up to the extreme ones."""

import itertools
import math
import sys

import pytest
from fresh_process import run_fresh
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.optimize import brentq
from scipy.stats import norm

from dpprof.private.accounting import accountants
from dpprof.private.accounting.accountants import bound_epsilon
from dpprof.private.accounting.budget import Spent, find_noise
from dpprof.private.accounting.renyi import make_compute_rdp
from dpprof.private.accounting.schedule import Sampling
from dpprof.private.accounting.search import BeyondReachError

RATES = {1e-5: 1e-9, 1e-4: 1e-7, 1e-3: 1e-12, 1e-2: 1e-5, 0.1: 1e-6, 1.0: 1e-8}
"""With each rate a delta."""

SETTINGS = list(itertools.product([10**2, 10**3, 10**4, 10**5, 10**6], RATES))

STORED = [
    # noise multiplier, rate, steps, delta, epsilon by dp-accounting 0.6.0 with its defaults
    (1.0, 0.01, 100, 1e-5, 0.71804),
    (10.0, 1.0, 100, 1e-5, 4.37718),
    (0.4, 1e-5, 100, 1e-8, 1.86254),
    (0.7, 0.01, 1000, 1e-5, 4.61829),
    (1.0, 0.01, 10_000, 1e-6, 6.90742),
    (0.8, 0.001, 100_000, 1e-8, 3.51878),
    (0.6, 1e-4, 1_000_000, 1e-7, 2.35035),
]


@pytest.mark.parametrize(("noise", "rate", "steps", "delta", "stored"), STORED)
def test_epsilon_is_that_of_dp_accounting_and_never_less(noise, rate, steps, delta, stored) -> None:
    history = [(noise, rate, steps)]

    if steps <= 10_000:  # of more it takes long, or refuses
        assert stored * 0.998 <= bound_epsilon(history, delta, "prv") <= stored * 1.002 + 0.011
    assert stored * 0.998 <= bound_epsilon(history, delta, "rdp") <= 3 * stored
    if "pld" in accountants.list_installed():
        assert bound_epsilon(history, delta, "pld") == pytest.approx(stored, rel=1e-4)


@pytest.mark.parametrize("rate", [1e-5, 1e-3, 0.02, 0.4])
@pytest.mark.parametrize("noise", [0.3, 0.7, 1.0, 4.0])
def test_divergences_are_those_that_opacus_adds_up_term_by_term(rate, noise) -> None:
    question = {"q": rate, "noise_multiplier": noise, "steps": 3}
    orders = RDPAccountant.DEFAULT_ALPHAS

    told = make_compute_rdp(lambda **_: None)(**question, orders=orders)

    # Opacus leaves out terms below exp(-30), of which the last digits of tiny ones consist.
    assert told == pytest.approx(compute_rdp(**question, orders=orders), rel=1e-8, abs=1e-11)
    assert (told > 0).all()


@pytest.mark.parametrize(
    "question",
    [{"q": 0.5, "noise_multiplier": 200.0}, {"q": 0.1, "noise_multiplier": 1e-200}, {"q": 1.0}],
)
def test_what_is_not_added_up_at_once_is_opacus_s(question) -> None:
    def compute(**asked):
        return asked

    asked = {"noise_multiplier": 1.0, "steps": 2, "orders": [1.5, 4.0]} | question

    assert make_compute_rdp(compute)(**asked) == asked


def find_lower_bound(history: list, delta: float) -> float:
    """Return Opacus's lower bound of epsilon at a delta."""
    book = PRVAccountant()
    book.history = history
    error = delta / 1000
    return book._get_dprv(0.01, error).compute_epsilon(delta, error, 0.01)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "rate"), SETTINGS)
def test_the_tightest_is_dp_accounting_s_to_a_percent_and_no_less_than_a_lower_bound(
    steps, rate
) -> None:
    accounting = pytest.importorskip("dp_accounting")
    delta = RATES[rate]
    noise = find_noise(3.0, delta, steps, Sampling(rate), "tightest")
    history = [(noise, rate, steps)]
    spent = Spent(Sampling(rate), delta, "tightest")
    spent.history = history
    sound = max(delta, accountants._ROUNDING * steps)  # below it dp-accounting's FFT rounds

    book = accounting.pld.PLDAccountant()
    event = accounting.GaussianDpEvent(noise)
    book.compose(accounting.PoissonSampledDpEvent(rate, event) if rate < 1 else event, steps)
    expected = book.get_epsilon(sound)

    assert 2.97 <= spent.epsilon() <= 3.0
    if sound == delta or rate == 1:
        assert spent.epsilon() == pytest.approx(book.get_epsilon(delta), rel=0.01)
    else:
        assert expected <= spent.epsilon()  # rdp's, at a smaller delta
    try:
        accountants._refuse_long(history, sound)
    except BeyondReachError:
        return  # Opacus would take gigabytes
    assert spent.epsilon() >= find_lower_bound(history, sound)


def exact_epsilon(noise: float, steps: int, delta: float) -> float:
    """The Gaussian mechanism's epsilon, Balle and Wang 2018, theorem 8."""
    mu = math.sqrt(steps) / noise

    def excess(epsilon: float) -> float:
        far = math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return norm.cdf(mu / 2 - epsilon / mu) - far - delta

    return brentq(excess, 0, 100)


@pytest.mark.parametrize("accountant", ["prv", "rdp", "pld", "tightest"])
def test_all_samples_in_every_step_are_the_gaussian_mechanism(accountant) -> None:
    if accountant == "pld":
        pytest.importorskip("dp_accounting")
    exact = exact_epsilon(40.0, 400, 1e-6)

    found = find_noise(exact, 1e-6, 400, Sampling(1.0), accountant)

    loose = 1.15 if accountant == "rdp" else 1.01
    assert 40.0 * 0.9999 <= found <= 40.0 * loose


EXTREME = [
    (0.0, 0.01, 100, 1e-5),
    (1e-300, 0.01, 100, 1e-5),
    (1e-3, 1e-5, 10**6, 1e-12),
    (0.05, 0.5, 10, 0.5),
    (1e6, 1.0, 10**6, 1e-12),
    (1.0, 2.0**-53, 10**6, 1e-12),
    (1.0, 0.01, 187_600, 1e-6),
    (0.45, 1e-5, 10**6, 1e-10),
    (2.0, 1e-3, 10**6, 1e-12),
    (1.0, 0.01, 100, 1e-300),
    (1.0, 0.01, 100, 1 - 1e-16),
    (1.0, 0.01, 10**12, 1e-5),
]


def test_extremes_are_answered_in_seconds_and_within_a_gibibyte() -> None:
    code = f"""
import time
from dpprof.private.accounting.budget import Spent
from dpprof.private.accounting.schedule import Sampling
for noise, rate, steps, delta in {EXTREME}:
    for accountant in ("prv", "rdp", "tightest"):
        spent, begun = Spent(Sampling(rate), delta, accountant), time.process_time()
        spent.history = [(noise, rate, steps)]
        print(noise, steps, spent.epsilon(), time.process_time() - begun)
held = open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]
print(0, 0, 0, int(held) / 2**20)
"""
    *told, (*_, gibibytes) = [map(float, line.split()) for line in run_fresh(code).splitlines()]

    assert gibibytes <= 1
    for noise, steps, epsilon, took_s in told:
        assert took_s < 15
        assert epsilon >= 0
        assert noise >= 0.01 or math.isinf(epsilon) or epsilon > 100 or steps == 10


def test_prv_leaves_to_rdp_what_it_would_round() -> None:
    """At this delta it told 3.35, and dp-accounting 3.66."""
    history = [(2.0, 1e-3, 10**6)]
    spent = Spent(Sampling(1e-3), 1e-12, "prv")
    spent.history = history

    with pytest.raises(BeyondReachError, match="prv rounds by more than a delta of 1e-12 in 1,000"):
        bound_epsilon(history, 1e-12, "prv")
    assert spent.epsilon() == bound_epsilon(history, 1e-12, "rdp") > 3.66


def test_a_trade_off_curve_bounds_that_of_the_gaussian_mechanism() -> None:
    spent = Spent(Sampling(1.0), None, "prv")
    spent.history = [(2.0, 1.0, 1)]  # mu = 1 / 2
    for rate in (1e-4, 0.01, 0.1, 0.5, 0.9):
        exact = norm.sf(norm.isf(rate) - 0.5)
        assert exact <= spent.true_positive_rate(rate) <= 2.5 * exact
    assert spent.true_positive_rate(1.0) == 1.0
    assert spent.true_positive_rate(0.0) <= 1e-5
    with pytest.raises(ValueError, match="false_positive_rate must lie between 0 and 1, and is 2"):
        spent.true_positive_rate(2)


def test_pld_where_it_is_not_installed_is_a_sentence(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    for ask in (
        lambda: find_noise(3.0, 1e-5, 100, Sampling(0.01), "pld"),
        lambda: bound_epsilon([(1.0, 0.01, 100)], 1e-5, "pld"),
    ):
        with pytest.raises(ImportError, match=r"pld needs dp-accounting, .* pip install 'dpprof\["):
            ask()
