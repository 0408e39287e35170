"""Verification of a checkout in which nothing is computed: every method passes."""

from dpprof.records.verdict import Case, Findings
from dpprof.spec.mechanisms import FLAT


def verify(model, method):
    variants = ("sdpa", "eager", "opacus")
    cases = [
        Case(attention=name, batch_size=4, outcome="passed", groups=1, references=["invented"])
        for name in variants
    ]
    return Findings(FLAT, cases)
