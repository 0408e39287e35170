"""Verification standings: the verdicts on the methods of experiments, and their table."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.mechanisms import is_other_mechanism
from dpprof.experiments.planning.code_digest import verified_as
from dpprof.experiments.records.advice import Option
from dpprof.experiments.records.budget import MethodCost
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.verdict import Standing, read_verdict, split_holes
from dpprof.results.analysis.tables.axes import axes_of

if TYPE_CHECKING:
    import pandas as pd

DAGGER = "\N{DAGGER}"  # marks methods that are not verified, wherever their numbers are shown
DOUBLE_DAGGER = "\N{DOUBLE DAGGER}"  # marks methods with another mechanism than flat clipping
Marks = Mapping[str, Collection[str]]  # the methods that bear each sign
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
        standing = verdicts[key]
        # A graph replays the operators of the steps that a verdict has seen.
        is_seen = experiment.execution != "compiled" and experiment.head == "logits"
        if standing.verified and not is_seen:
            reason = "its verdict is about steps that are not compiled, with head logits"
            standing = standing._replace(verified=None, reason=reason)
        standings[experiment.id] = standing
    return standings


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


def list_verification(
    experiments: Iterable[Experiment], standings: Mapping[str, Standing]
) -> list[dict[str, Any]]:
    """Return one row per method, model and variant of attention."""
    rows = {}
    for experiment in experiments:
        axes = axes_of(experiment)
        named = {"model": verified_as(experiment)}
        named |= {name: axes[name] for name in ("attention", "method")}
        standing = standings.get(experiment.id, UNKNOWN)
        rows[tuple(named.values())] = named | standing._asdict()
    return [rows[key] for key in sorted(rows)]


def methods_by_hole(verification: "pd.DataFrame") -> dict[str, list[str]]:
    """Return the ways in which guarantees were lost, each with its methods."""
    methods: dict[str, list[str]] = {}
    rows = verification[verification["holes"].notna()]
    for method, holes in dict(zip(rows["method"], rows["holes"], strict=True)).items():
        for hole in split_holes(holes):
            methods.setdefault(hole, []).append(str(method))
    return methods


def find_marks(verification: "pd.DataFrame") -> Marks:
    """Return the methods that bear each sign: not verified everywhere, or of other mechanisms."""
    bears = {
        DAGGER: ~verification["verified"].eq(True),
        DOUBLE_DAGGER: verification["mechanism"].map(is_other_mechanism).astype(bool),
    }
    return {mark: set(verification.loc[rows, "method"]) for mark, rows in bears.items()}
