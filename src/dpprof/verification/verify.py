"""Compares a method with references: same weights, same batch, no noise, float64.

The model is a small one of the same layer types, its weights moved away from where they
start, since some gradients are too regular there to tell methods apart. Bounds lie
between the samples' norms, so that some samples are clipped and some are not.
"""

import copy
import math
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import SGD

from dpprof import catalogue
from dpprof.catalogue import UnsupportedError
from dpprof.devices.cpu import Cpu
from dpprof.experiment import Dimensions, Experiment
from dpprof.instruments.setup import make_batch
from dpprof.messages import KIND_LIMIT, shorten
from dpprof.methods.base import Batch, TrainingStep
from dpprof.methods.microbatch import Microbatch
from dpprof.models.build import build_model
from dpprof.models.precision import apply_dtype
from dpprof.verdict import BUILT_IN, TOLERANCE, Case
from dpprof.verification import reference
from dpprof.verification.reference import Group

REDUCED = Dimensions(vocab_size=11, d_model=12, layers=2, heads=3)
"""So few tokens that most sequences repeat one, which norms of embeddings must get right."""

SEQ_LEN = 9
BATCH_SIZES = (1, 4)
ATTENTIONS: tuple[str, ...] = get_args(Experiment.model_fields["attention"].annotation)

STEPS = 2
"""What one step leaves behind must not reach the next."""

_MESSAGE_LIMIT = 500


class WrongError(Exception):
    """A method does something that no gradient could make good; says what."""


class _Subject(NamedTuple):
    """What is trained, and what is known of it."""

    experiment: Experiment
    model: nn.Module
    batch: Batch
    samples: Sequence[Tensor]
    """Of the samples, the gradients before clipping, as the reference has them."""

    by_loop: Tensor
    """The clipped gradient that ``microbatch`` finds; (sum of P,)."""


class _Step(NamedTuple):
    """What a method said and did in one step."""

    groups: list[Group]
    gradient: Tensor
    norms: Tensor | None


def verify(model: str, method: str) -> list[Case]:
    """Compare a method on a model with the references, in every case.

    Args:
        model: A model's name, or ``built-in``.
        method: A method's name.
    """
    torch.set_num_threads(1)
    return [
        verify_case(model, method, attention, batch_size)
        for attention in ATTENTIONS
        for batch_size in BATCH_SIZES
    ]


def verify_case(model: str, method: str, attention: str, batch_size: int) -> Case:
    """Compare in one case; whatever goes wrong is in the case."""
    experiment = Experiment.model_validate(
        {
            "model": REDUCED if model == BUILT_IN else model,
            "method": method,
            "batch_size": batch_size,
            "seq_len": SEQ_LEN,
            "dtype": "float64",
            "attention": attention,
            "device": "cpu",
            "noise_multiplier": 0.0,
        }
    )
    known: dict[str, Any] = {"attention": attention, "batch_size": batch_size}
    try:
        subject = _prepare(experiment)
    except UnsupportedError as error:
        return Case(**known, outcome="unsupported", reason=shorten(str(error)))
    except Exception as error:  # noqa: BLE001 (a model of another package may do anything)
        traceback.print_exc()
        return Case(**known, outcome="unknown", reason=f"no reference: {_spell(error)}")
    known["max_grad_norm"] = subject.experiment.max_grad_norm
    try:
        return _compare(subject, known)
    except UnsupportedError as error:
        return Case(**known, outcome="unsupported", reason=shorten(str(error)))
    except WrongError as error:
        return Case(**known, outcome="failed", reason=shorten(str(error)))
    except Exception as error:  # noqa: BLE001 (however a method fails, it has failed)
        traceback.print_exc()
        return Case(**known, outcome="failed", reason=_spell(error))


def choose_bound(norms_B: Tensor) -> float:
    """Choose a bound between the norms, so that some are clipped; of one sample, that it is."""
    if len(norms_B) == 1:
        return float(norms_B) / 2
    return float(norms_B.min() + norms_B.max()) / 2


def _prepare(experiment: Experiment) -> _Subject:
    """Make what a method is tried on, with a bound that suits it, and the references."""
    torch.manual_seed(experiment.seed)
    model = apply_dtype(build_model(experiment), experiment, torch.device("cpu")).train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0  # or no two passes would compute the same
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.ndim else 1
            parameter.add_(torch.randn_like(parameter) * width**-0.5)
    batch = make_batch(model, Cpu(), experiment.batch_size, experiment.seq_len)
    samples = reference.sample_gradients(model, *batch)
    bound = choose_bound(torch.cat(samples, 1).norm(dim=1))
    experiment = experiment.model_copy(update={"max_grad_norm": bound})
    by_loop = next(_take_steps(Microbatch, experiment, model, batch)).gradient
    return _Subject(experiment, model, batch, samples, by_loop)


def _compare(subject: _Subject, known: dict[str, Any]) -> Case:
    experiment, model, batch, samples, by_loop = subject
    method: type[TrainingStep] = catalogue.load("methods", experiment.method)
    errors, norm_errors, names = [], [], [reference.NAME]
    for step in _take_steps(method, experiment, model, batch):
        expected = [reference.clip_and_average(samples, step.groups)]
        if method is not Microbatch and _is_flat(step.groups, experiment):
            names = ["microbatch", reference.NAME]
            expected.append(by_loop)
        errors += [float((step.gradient - one).norm() / one.norm()) for one in expected]
        norms = reference.group_norms(samples, step.groups) if step.groups else None
        if step.norms is not None:
            norm_errors.append(_error_of_norms(step.norms, norms))
    worst = {"gradient": max(errors, key=_rank), "norms": max(norm_errors, key=_rank, default=None)}
    bounds = [group.bound for group in step.groups]
    return Case(
        **known,
        outcome="failed" if (reason := _complain(worst)) else "passed",
        reason=reason,
        groups=len(bounds),
        norms_clipped=0 if norms is None else int((norms > torch.tensor(bounds)).sum()),
        sensitivity=math.hypot(*bounds) / experiment.max_grad_norm if bounds else None,
        references=names,
        max_relative_error=_finite(worst["gradient"]),
        max_relative_error_of_norms=_finite(worst["norms"]),
    )


def _take_steps(
    method: type[TrainingStep], experiment: Experiment, model: nn.Module, batch: Batch
) -> Iterator[_Step]:
    """Take steps on a copy of the model, as ``TrainingStep.run`` would; they change no weight."""
    step = method(copy.deepcopy(model), experiment)
    trainable = [p for p in step.module.parameters() if p.requires_grad]
    step.attach_optimizer(SGD(trainable, lr=0.0))
    for _ in range(STEPS):
        step.compute_gradient(batch, lambda _: None)
        groups = _place_groups(step, trainable)
        missing = sum(parameter.grad is None for parameter in trainable)
        if missing:
            raise WrongError(f"{missing} of {len(trainable)} parameters have no gradient")
        gradient = torch.cat([p.grad.flatten() for p in trainable if p.grad is not None])
        yield _Step(groups, gradient.clone(), step.sample_norms())
        step.apply_gradient()
        step.optimizer.zero_grad()


def _place_groups(step: TrainingStep, trainable: Sequence[nn.Parameter]) -> list[Group]:
    position = {id(parameter): at for at, parameter in enumerate(trainable)}
    groups = [
        Group([position[id(p)] for p in group.parameters], float(group.bound), group.epsilon)
        for group in step.clip_groups()
    ]
    placed = sorted(at for group in groups for at in group.positions)
    if groups and placed != list(range(len(trainable))):
        raise WrongError("its groups do not clip every trainable parameter once")
    return groups


def _is_flat(groups: Sequence[Group], experiment: Experiment) -> bool:
    """Tell whether the definition of ``microbatch`` applies."""
    flat = Group(groups[0].positions, experiment.max_grad_norm) if groups else None
    return list(groups) == [flat]


def _error_of_norms(found: Tensor, expected_BG: Tensor | None) -> float:
    """Compare with norms by group, or over all groups, as a share of the sample's whole norm."""
    if expected_BG is None:
        raise WrongError("it tells norms, and clips nothing")
    whole_B = expected_BG.norm(dim=1)
    if found.shape == whole_B.shape:
        return float(((found - whole_B) / whole_B).abs().max())
    if found.shape == expected_BG.shape:
        return float(((found - expected_BG) / whole_B[:, None]).abs().max())
    raise WrongError(f"its norms have the shape {tuple(found.shape)}")


def _rank(error: float) -> float:
    """Let what is no number count as the largest error."""
    return math.inf if math.isnan(error) else error


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
