"""Asks Opacus's accountants in a separate process, since Opacus imports torch."""

import json
from collections.abc import Sequence
from functools import partial

from dpprof.accounting.plan import NoisePlan
from dpprof.launch.device_slots import cpu_slot
from dpprof.launch.isolated import isolate
from dpprof.planning.code_digest import ACCOUNTING, file_digest
from dpprof.spec.privacy import Privacy
from dpprof.spec.validation import InputError

ACCOUNTING_TIMEOUT_S = 600
"""RDP takes seconds, PRV up to minutes for a million steps; what takes longer counts as hung."""

_ACCOUNT = "dpprof.accounting.noise:account"


def account_apart(privacy: Privacy, tokens_per_sample: Sequence[float]) -> list[NoisePlan]:
    """Plan batch, steps and noise of a budget, for each number of tokens in a sample.

    It may run at the same time as predictions, but waits for measurements to end.

    Args:
        privacy: The budget.
        tokens_per_sample: Without padding.

    Raises:
        InputError: The accountant takes too long, or its process ended.
    """
    digest = partial(file_digest, ACCOUNTING)
    with isolate(None, [cpu_slot(1, shared=True)], digest, __file__) as isolation:
        isolation.begin()
        ended = isolation.run(
            list[NoisePlan],
            _ACCOUNT,
            privacy.model_dump_json(),
            json.dumps(list(tokens_per_sample)),
            timeout_s=ACCOUNTING_TIMEOUT_S,
        )
    if ended.answer is None:
        why = ended.explain(f"accountant {privacy.accountant}", ACCOUNTING_TIMEOUT_S)
        otherwise = "; rdp is fast" if privacy.accountant == "prv" else ""
        raise InputError(f"no noise is known: {why}{otherwise}")
    return ended.answer
