"""Recurrent models: recorded memory equals the estimate to the byte, with every method."""

import itertools

import pytest
from factory import make_experiment
from memory_steps import record_and_estimate

from dpprof.experiments.config import registry

OWN = ("char-lstm", "char-gru", "char-rnn", "ptb-lstm-small")
REFUSED = set()
QUICK = [("char-lstm", "standard"), ("char-gru", "flash-bk"), ("char-lstm", "opacus-hooks")]
CASES = [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(OWN, registry.names("methods"))
    if case not in REFUSED
]


@pytest.mark.parametrize(("model", "method"), CASES)
def test_an_estimate_equals_what_is_recorded(model, method) -> None:
    real, fake = record_and_estimate(
        make_experiment(model=model, method=method, batch_size=3, seq_len=6, noise_multiplier=0.1)
    )

    assert fake.compute.flops_by_phase == real.compute.flops_by_phase
