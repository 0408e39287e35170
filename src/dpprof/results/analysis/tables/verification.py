"""The table of verdicts, and what it says of methods."""

from collections.abc import Iterable, Mapping

import pandas as pd

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.mechanisms import is_other_mechanism
from dpprof.experiments.planning.code_digest import verified_as
from dpprof.experiments.records.verdict import Standing, split_holes
from dpprof.results.analysis.standings import DAGGER, DOUBLE_DAGGER, UNKNOWN, Marks
from dpprof.results.analysis.tables.axes import axes_of
from dpprof.results.analysis.tables.frames import make_frame


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
