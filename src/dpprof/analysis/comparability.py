"""What must be equal for two runs of an experiment to be compared: device, versions, settings."""

from collections.abc import Sequence
from itertools import islice, product

from dpprof.analysis.results_folder import ResultsFolder
from dpprof.analysis.surroundings import Fact, facts_of
from dpprof.records.result import Result
from dpprof.spec.experiment import Experiment

_MOST_PAIRS = 20_000
"""How many pairs of experiments are looked at for the two that are most alike."""

_MOST_NAMED = 3
"""How many differences of two experiments are named."""


def find_differences(
    baseline: Sequence[Result], candidate: Sequence[Result]
) -> dict[Fact, tuple[str, str]]:
    """Return what differs between two sides of one run, with both sides' values.

    Replicates of one side that differ count too. Nothing ran for a prediction, so of its machine
    only the threads count, for a CPU's workspaces.
    """
    sides = _collect(baseline), _collect(candidate)
    facts = dict.fromkeys([*sides[0], *sides[1]])
    found = {fact: tuple(side.get(fact, {"none"}) for side in sides) for fact in facts}
    return {
        fact: (_spell(was), _spell(now))
        for fact, (was, now) in found.items()
        if was != now or len(was) > 1
    }


def _collect(results: Sequence[Result]) -> dict[Fact, set[str]]:
    found: dict[Fact, set[str]] = {}
    for result in results:
        for fact, value in facts_of(result).items():
            found.setdefault(fact, set()).add("none" if value is None else str(value))
    return found


def _spell(values: set[str]) -> str:
    return " or ".join(sorted(values))


def spell_difference(fact: Fact, values: tuple[str, str]) -> str:
    """Say what differs, and which option compares runs nevertheless."""
    named = f"{fact.name} {values[0]} in the baseline and {values[1]} in the candidate"
    return f"{named} (--across {fact.kind} compares them nevertheless)"


def explain_nothing_in_common(baseline: ResultsFolder, candidate: ResultsFolder) -> str:
    """Say that no run is in both folders, and in what the most similar experiments differ."""
    if {name for name, _ in baseline.runs} & {name for name, _ in candidate.runs}:
        return "no experiment was run on both sides under the same instrument"
    sides = [
        {name: found[0].experiment for (name, _), found in side.runs.items()}
        for side in (baseline, candidate)
    ]
    pairs = islice(product(sides[0].items(), sides[1].items()), _MOST_PAIRS)
    differences = [(a, b, _differing_keys(one, other)) for (a, one), (b, other) in pairs]
    a, b, keys = min(differences, key=lambda pair: len(pair[2]))
    if len(keys) > _MOST_NAMED:
        return "no experiment is in both folders"
    told = [
        f"{key} {str(getattr(sides[0][a], key))[:80]} and {str(getattr(sides[1][b], key))[:80]}"
        for key in keys
    ]
    return f"no experiment is in both folders; the most similar differ in {', '.join(told)}"


def _differing_keys(one: Experiment, other: Experiment) -> list[str]:
    keys = type(one).model_fields
    return [key for key in keys if getattr(one, key) != getattr(other, key)]
