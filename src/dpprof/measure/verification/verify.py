"""Compares a method with references: same weights and batch, without noise, in float64."""

import functools
import math
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, get_args

import torch
from torch import Tensor

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.mechanisms import NO_CLIPPING
from dpprof.experiments.planning.stand_ins import StandIn
from dpprof.experiments.records.verdict import (
    GRADIENT_SCENARIOS,
    TOLERANCE,
    Case,
    Findings,
    Scenario,
)
from dpprof.measure.verification import reference
from dpprof.measure.verification.float32_islands import lift_float32
from dpprof.measure.verification.guarantees import GUARANTEES
from dpprof.measure.verification.reference import PlacedGroup
from dpprof.measure.verification.steps import WrongError, complain_of_mechanism, take_steps
from dpprof.measure.verification.subjects import Subject, describe_case, prepare
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.microbatch import Microbatch
from dpprof.system.messages import KIND_LIMIT, shorten

BATCH_SIZES = (1, 4)
ATTENTIONS: tuple[str, ...] = get_args(Experiment.model_fields["attention"].annotation)

SPECIAL = ("sdpa", 4)  # the attention and the batch size of every scenario but the plain one

_MESSAGE_LIMIT = 500


def verify(model: str, method: str) -> Findings:
    """Compare a method on a model with the references in every case.

    ``model`` is a name, ``built-in``, or the canonical JSON of a stand-in.
    """
    torch.set_num_threads(1)
    if not model.startswith("{"):
        return _verify(model, method, ATTENTIONS, is_padded=False)
    stand_in = StandIn.model_validate_json(model)
    attentions = [name for name in ATTENTIONS if name != "opacus"]  # these models have their own
    with lift_float32():
        return _verify(stand_in, method, attentions, is_padded=stand_in.padding is not None)


def _verify(
    model: str | StandIn, method: str, attentions: Sequence[str], *, is_padded: bool
) -> Findings:
    scenarios = [name for name in GRADIENT_SCENARIOS[1:] if is_padded or name != "other padding"]
    cases = [
        verify_case(model, method, attention, batch_size)
        for attention in attentions
        for batch_size in BATCH_SIZES
    ]
    plain = next(case for case in cases if (case.attention, case.batch_size) == SPECIAL)
    cases += [verify_case(model, method, *SPECIAL, scenario) for scenario in scenarios]
    mechanism = None
    with suppress(Exception):  # each case has the reason
        mechanism = str(registry.load("methods", method).mechanism)
    if mechanism != NO_CLIPPING:
        cases += [_try_guarantee(model, method, plain, scenario) for scenario in GUARANTEES]
    return Findings(mechanism, cases)


def _try_guarantee(model: str | StandIn, method: str, plain: Case, scenario: Scenario) -> Case:
    """Try one of ``GUARANTEES``, if the plain case passed."""
    if plain.outcome == "passed":
        return verify_case(model, method, *SPECIAL, scenario)
    attention, batch_size = SPECIAL
    return Case(
        scenario=scenario,
        attention=attention,
        batch_size=batch_size,
        outcome="unsupported" if plain.outcome == "unsupported" else "unknown",
        reason=f"not tried: {plain.reason}",
    )


def verify_case(
    model: str | StandIn, method: str, attention: str, batch_size: int, scenario: Scenario = "plain"
) -> Case:
    """Compare in one case, or try a guarantee; a failure is part of the case."""
    facts: dict[str, Any] = {"scenario": scenario, "attention": attention}
    facts["batch_size"] = batch_size
    try:
        batch = "plain" if scenario in GUARANTEES else scenario
        subject, by_loop = _prepare_once(model, attention, batch_size, batch)
    except UnsupportedError as error:
        return Case(**facts, outcome="unsupported", reason=shorten(str(error)))
    except Exception as error:  # noqa: BLE001 (a model of another package may do anything)
        traceback.print_exc()
        return Case(**facts, outcome="unknown", reason=f"no reference: {_spell(error)}")
    experiment = subject.experiment.model_copy(update={"method": method})
    subject = subject._replace(experiment=experiment)
    facts["max_grad_norm"] = experiment.max_grad_norm
    torch.manual_seed(experiment.seed)
    outcome, reason = "passed", None
    try:
        if scenario not in GUARANTEES:
            return _compare(subject, by_loop, facts)
        GUARANTEES[scenario](registry.load("methods", method), subject)
    except UnsupportedError as error:
        outcome, reason = "unsupported", shorten(str(error))
    except WrongError as error:
        outcome, reason = "failed", shorten(str(error))
    except Exception as error:  # noqa: BLE001 (a method may raise anything)
        outcome, reason = "unsupported", _spell(error)
        if scenario not in GUARANTEES:
            traceback.print_exc()
            outcome = "failed"
    return Case(**facts, outcome=outcome, reason=reason)


@functools.cache
def _prepare_once(
    model: str | StandIn, attention: str, batch_size: int, scenario: Scenario
) -> tuple[Subject, Tensor]:
    """Return a subject, for all methods and guarantees, and its gradient by ``microbatch``."""
    subject = prepare(describe_case(model, "microbatch", attention, batch_size), scenario)
    return subject, next(take_steps(Microbatch, subject)).gradient


def _compare(subject: Subject, by_loop: Tensor, facts: dict[str, Any]) -> Case:
    experiment, samples = subject.experiment, subject.samples
    method = registry.load("methods", experiment.method)
    errors, norm_errors, names = [], [], [reference.REFERENCE_NAME]
    for taken in take_steps(method, subject):
        expected = [reference.clip_and_average(samples, taken.groups)]
        # The groups of microbatch: one, with its bound and its epsilon.
        flat = [PlacedGroup(g.positions, experiment.max_grad_norm) for g in taken.groups[:1]]
        if method is not Microbatch and flat and taken.groups == flat:
            names = ["microbatch", reference.REFERENCE_NAME]
            expected.append(by_loop)
        errors += [float((taken.gradient - g).norm() / g.norm()) for g in expected]
        norms = reference.group_norms(samples, taken.groups) if taken.groups else None
        if taken.norms is not None:
            norm_errors.append(_error_of_norms(taken.norms, norms))
    worst = {"gradient": _largest(errors), "norms": _largest(norm_errors)}
    reason = _complain(worst) or complain_of_mechanism(method, taken)
    bounds = [group.bound for group in taken.groups]
    return Case(
        **facts,
        outcome="failed" if reason else "passed",
        reason=reason,
        groups=len(bounds),
        norms_clipped=0 if norms is None else int((norms > norms.new_tensor(bounds)).sum()),
        sensitivity=taken.sensitivity,
        references=names,
        max_relative_error=_finite(worst["gradient"]),
        max_relative_error_of_norms=_finite(worst["norms"]),
    )


def _error_of_norms(norms: Tensor, expected_BG: Tensor | None) -> float:
    """Return the largest error of a sample's norms, relative to its norm over all groups."""
    if expected_BG is None:
        raise WrongError("it has norms, and clips nothing")
    whole_B = expected_BG.norm(dim=1)
    if norms.shape == whole_B.shape:
        return float(((norms - whole_B) / whole_B).abs().max())
    if norms.shape == expected_BG.shape:
        return float(((norms - expected_BG) / whole_B[:, None]).abs().max())
    raise WrongError(f"its norms have the shape {tuple(norms.shape)}")


def _largest(errors: Sequence[float]) -> float | None:
    """Return the largest error, infinity where one is not a number; None if there is none."""
    return max((math.inf if math.isnan(error) else error for error in errors), default=None)


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def _complain(worst: dict[str, float | None]) -> str | None:
    for what, error in worst.items():
        if error is None or error <= TOLERANCE:
            continue
        if not math.isfinite(error):
            return f"the {what} found: not finite"
        return f"relative error of the {what}: {error:.1e}"
    return None


def _spell(error: BaseException) -> str:
    kind = shorten(type(error).__name__, KIND_LIMIT)
    return f"{kind}: {shorten(str(error), _MESSAGE_LIMIT)}"
