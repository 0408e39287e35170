"""Asks the accountants in a separate process, since Opacus imports torch."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dpprof.experiments.accounting.plan import NoiseOfBatch, NoiseOfMechanism, NoisePlan
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.launch.device_slots import cpu_slot
from dpprof.experiments.launch.isolated import Answer, isolate
from dpprof.experiments.planning.code_digest import ACCOUNTING, file_digest
from dpprof.experiments.planning.job_environment import versions_in_jobs
from dpprof.experiments.records.answers import take_kept
from dpprof.experiments.records.record import Part, Record, ResultError, read_record, write_record
from dpprof.system.files import canonical_json, sha256_hex

MECHANISMS = ACCOUNTING.with_name("mechanisms.py")
"""The file that does so for mechanisms."""

ACCOUNTING_TIMEOUT_S = 600
"""RDP takes seconds, PRV up to minutes for a million steps; what takes longer counts as hung."""

_ACCOUNT = "dpprof.experiments.accounting.noise:account"
_MECHANISMS = "dpprof.experiments.accounting.mechanisms:account"


class _Kept(Part):
    """What the accountants said; the file's name has a digest of what they were asked."""

    schema_version: Literal[1] = 1
    content_digest: str
    plans: list[NoisePlan]


class _KeptMechanisms(Part):
    schema_version: Literal[1] = 1
    content_digest: str
    noises: list[NoiseOfMechanism]


def account_once(
    root: Path, privacy: Privacy, tokens_per_sample: Sequence[float], *, again: bool = False
) -> list[NoisePlan]:
    """Do what ``account_apart`` does, or read what it said of the same budget at any price.

    ``root`` holds ``results``. Tokens of a sample are without padding. With ``again`` what is kept
    is ignored.

    Raises:
        InputError: As ``account_apart``.
    """
    path = _find_kept(root, ACCOUNTING, privacy, list(tokens_per_sample))
    if not again and (kept := _read_kept(path, _Kept)):
        return kept.plans
    plans = account_apart(privacy, tokens_per_sample)
    if all(plan.planned.noise_multiplier for plan in plans):
        write_record(path, _Kept, {"plans": plans})
    return plans


def account_mechanisms_once(
    root: Path,
    privacy: Privacy,
    planned: NoiseOfBatch,
    names: Sequence[str],
    *,
    momentum: float,
    again: bool = False,
) -> list[NoiseOfMechanism]:
    """Plan mechanisms (``plan_mechanisms``) in a process of its own, or read what is kept of it.

    Raises:
        InputError: As ``account_apart``.
    """
    question = planned.model_dump_json(), json.dumps(list(names)), json.dumps(momentum)
    path = _find_kept(root, MECHANISMS, privacy, question)
    if not again and (kept := _read_kept(path, _KeptMechanisms)):
        return kept.noises
    told = _ask_apart(list[NoiseOfMechanism], _MECHANISMS, MECHANISMS, privacy, *question)
    write_record(path, _KeptMechanisms, {"noises": told})
    return told


def _find_kept(root: Path, code: Path, privacy: Privacy, question: Any) -> Path:
    asked = privacy.model_dump(mode="json", exclude={"price_per_hour"})
    versions = versions_in_jobs(("torch", "opacus", "dp-accounting"))
    digest = sha256_hex(canonical_json([asked, question, file_digest(code), versions]))
    return root / "results" / "accounting" / f"{digest[:16]}.json"


def _read_kept(path: Path, kind: type[Record]) -> Record | None:
    take_kept(path)
    try:
        return read_record(path, kind)
    except (FileNotFoundError, ResultError):
        return None  # to be found anew


def account_apart(privacy: Privacy, tokens_per_sample: Sequence[float]) -> list[NoisePlan]:
    """Plan batch, steps and noise of a budget, for each number of tokens in a sample.

    It may run at the same time as predictions, but waits for measurements to end.

    Tokens of a sample are without padding.

    Raises:
        InputError: The accountant takes too long, or its process ended.
    """
    question = json.dumps(list(tokens_per_sample))
    return _ask_apart(list[NoisePlan], _ACCOUNT, ACCOUNTING, privacy, question)


def _ask_apart(
    answer: type[Answer], function: str, code: Path, privacy: Privacy, *question: str
) -> Answer:
    with isolate(
        None, [cpu_slot(1, shared=True)], partial(file_digest, code), __file__
    ) as isolation:
        isolation.begin()
        ended = isolation.run(
            answer,
            function,
            *(privacy.model_dump_json(), *question),
            timeout_s=ACCOUNTING_TIMEOUT_S,
        )
    if ended.answer is None:
        why = ended.explain(f"accountant {privacy.accountant}", ACCOUNTING_TIMEOUT_S)
        otherwise = "" if privacy.accountant == "rdp" else "; rdp is fast"
        raise InputError(f"no noise is known: {why}{otherwise}")
    return ended.answer
