"""Verification standings: the verdicts on the methods of experiments."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.mechanisms import is_other_mechanism
from dpprof.experiments.planning.code_digest import verified_as
from dpprof.experiments.records.advice import Option
from dpprof.experiments.records.budget import MethodCost
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.verdict import Standing, read_verdict

DAGGER = "\N{DAGGER}"
"""Marks methods that are not verified, wherever their numbers are shown."""

DOUBLE_DAGGER = "\N{DOUBLE DAGGER}"
"""Marks methods that are private by another mechanism than flat clipping."""

Marks = Mapping[str, Collection[str]]
"""Maps each sign to the methods that bear it."""

UNKNOWN = Standing(None, "it has no verdict yet")


def read_standings(
    root: Path,
    experiments: Iterable[Experiment],
    digest_of: Callable[[str, str], str | None],
    damaged: list[ResultError] | None = None,
) -> dict[str, Standing]:
    """Return the standing of every experiment's method, by the experiment's id.

    A verdict on code of another digest than ``digest_of`` returns for its model and method does
    not count. If ``damaged`` is given, errors of verdict files are appended to it and not
    raised.

    Raises:
        ResultError: A verdict is cut, edited, of another version, or about others.
    """
    verdicts: dict[tuple[str, str, str], Standing] = {}
    standings = {}
    for experiment in experiments:
        key = (verified_as(experiment), experiment.method, experiment.attention)
        if key not in verdicts:
            try:
                verdicts[key] = _read(root, *key, digest_of(*key[:2]))
            except ResultError as error:
                if damaged is None:
                    raise
                damaged.append(error)
                verdicts[key] = Standing(None, f"its verdict file {error.problem}")
        standings[experiment.id] = _narrow(verdicts[key], experiment)
    return standings


def _narrow(standing: Standing, experiment: Experiment) -> Standing:
    """Return what a verdict says of an experiment's steps: it has seen plain ones alone."""
    if not standing.verified or (experiment.execution, experiment.head) == ("eager", "logits"):
        return standing
    reason = "its verdict is about steps with execution eager and head logits"
    return standing._replace(verified=None, reason=reason)


def _read(root: Path, model: str, method: str, attention: str, digest: str | None) -> Standing:
    try:
        verdict = read_verdict(root, model, method)
    except FileNotFoundError:
        return UNKNOWN
    if digest not in (None, verdict.code_digest):
        return Standing(None, "its verdict is about other code than the present")
    return verdict.stands_for(attention)


def sign(name: str, marks: Marks) -> str:
    """Return the signs that a method bears; empty for most."""
    return "".join(mark for mark, methods in marks.items() if name in methods)


def find_signs(methods: Iterable[Option | MethodCost]) -> Marks:
    """Return the methods that bear each sign."""
    rows = list(methods)
    return {
        DAGGER: [row.method for row in rows if not row.verified],
        DOUBLE_DAGGER: [row.method for row in rows if is_other_mechanism(row.mechanism)],
    }
