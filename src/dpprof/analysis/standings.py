"""Verification standings: the verdicts on the methods of experiments."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import pandas as pd

from dpprof.analysis.tables.axes import axes_of
from dpprof.analysis.tables.frames import make_frame
from dpprof.planning.code_digest import verified_as
from dpprof.records.record import ResultError
from dpprof.records.verdict import Standing, read_verdict, split_holes
from dpprof.spec.experiment import Experiment
from dpprof.spec.mechanisms import is_other_mechanism

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
    known: dict[tuple[str, str, str], Standing] = {}
    standings = {}
    for experiment in experiments:
        key = (verified_as(experiment), experiment.method, experiment.attention)
        if key not in known:
            try:
                known[key] = _read(root, *key, digest_of(*key[:2]))
            except ResultError as error:
                if damaged is None:
                    raise
                damaged.append(error)
                known[key] = Standing(None, f"its verdict file {error.problem}")
        standings[experiment.id] = known[key]
    return standings


def _read(root: Path, model: str, method: str, attention: str, digest: str | None) -> Standing:
    try:
        verdict = read_verdict(root, model, method)
    except FileNotFoundError:
        return UNKNOWN
    if digest not in (None, verdict.code_digest):
        return Standing(None, "its verdict is about other code than the present")
    return verdict.stands_for(attention)


def tabulate_verification(
    experiments: Iterable[Experiment], standings: Mapping[str, Standing]
) -> pd.DataFrame:
    """Return one row per method, model and variant of attention."""
    rows = {}
    for experiment in experiments:
        axes = axes_of(experiment)
        named = {"model": verified_as(experiment)}
        named |= {name: axes[name] for name in ("attention", "method")}
        standing = standings.get(experiment.id, UNKNOWN)
        rows[tuple(named.values())] = named | standing._asdict()
    return make_frame("verification", (rows[key] for key in sorted(rows)))


def name_unverified(verification: pd.DataFrame) -> dict[str, str]:
    """Return the methods that are not verified everywhere, each with one of the reasons."""
    rows = verification[~verification["verified"].eq(True)]
    return dict(zip(rows["method"].astype(str), rows["reason"].astype(str), strict=True))


def name_other_mechanisms(verification: pd.DataFrame) -> dict[str, str]:
    """Return the methods that use another mechanism than flat clipping, with that mechanism."""
    pairs = zip(verification["method"], verification["mechanism"], strict=True)
    return {str(method): mechanism for method, mechanism in pairs if is_other_mechanism(mechanism)}


def methods_by_hole(verification: pd.DataFrame) -> dict[str, list[str]]:
    """Return the ways in which guarantees were lost, each with its methods."""
    methods: dict[str, list[str]] = {}
    rows = verification[verification["holes"].notna()]
    for method, holes in dict(zip(rows["method"], rows["holes"], strict=True)).items():
        for hole in split_holes(holes):
            methods.setdefault(hole, []).append(str(method))
    return methods


def find_marks(verification: pd.DataFrame) -> Marks:
    """Return the methods that bear each sign."""
    return {
        DAGGER: name_unverified(verification),
        DOUBLE_DAGGER: name_other_mechanisms(verification),
    }


def sign(name: str, marks: Marks) -> str:
    """Return the signs that a method bears; empty for most."""
    return "".join(one for one, methods in marks.items() if name in methods)
