"""Verification of a checkout in which nothing is computed: what is not called otherwise passes."""

import os
import signal

from dpprof.experiments.config.mechanisms import FLAT
from dpprof.experiments.records.verdict import Case, Findings


def verify(model, method):
    if method == "test-dies":
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = "failed" if method == "test-raises" else "passed"
    cases = [
        Case(attention=name, batch_size=4, outcome=outcome, groups=1, references=["invented"])
        for name in ("sdpa", "eager", "opacus")
    ]
    return Findings(FLAT, cases)
