"""What must be equal for two runs of an experiment to be compared: device, versions, settings."""

from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

from dpprof.analysis.machines import machine_of
from dpprof.analysis.results_folder import ResultsFolder
from dpprof.records.comparison import Across
from dpprof.records.result import Result
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import PREDICTIONS

_PACKAGES = ("torch", "opacus", "dpprof")
_IN_PREDICTIONS = ("TORCH_CUDNN_SDPA_DEPRIORITIZED",)
"""The settings that predictions follow."""

_NO_SETTINGS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Settings whose effect is told otherwise: by the device and its number of threads."""

_MOST_PAIRS = 20_000
"""How many pairs of experiments are looked at for the two that are most alike."""

_MOST_NAMED = 3
"""How many differences of two experiments are named."""


class Fact(NamedTuple):
    """Something that must be equal."""

    kind: Across
    name: str


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
        for fact, value in _facts_of(result).items():
            found.setdefault(fact, set()).add("none" if value is None else str(value))
    return found


def _spell(values: set[str]) -> str:
    return " or ".join(sorted(values))


def _facts_of(result: Result) -> dict[Fact, Any]:
    predicted = result.instrument in PREDICTIONS
    device, provenance = result.device, result.provenance
    packages, settings = (_mapping(provenance.get(key)) for key in ("packages", "settings"))
    facts = {Fact("versions", name): packages.get(name) for name in _PACKAGES}
    if predicted:
        facts |= _facts_of_prediction(result)
    else:
        facts[Fact("device", "device")] = machine_of(result)
        if result.experiment.device == "cpu":
            facts[Fact("device", "threads")] = device.get("threads")
        else:
            facts[Fact("versions", "triton")] = packages.get("triton")
            facts[Fact("versions", "CUDA")] = provenance.get("cuda")
    for name, value in settings.items():
        if name in _IN_PREDICTIONS if predicted else name not in _NO_SETTINGS:
            facts[Fact("settings", name)] = value
    return facts


def _facts_of_prediction(result: Result) -> dict[Fact, Any]:
    if result.experiment.device == "cpu":
        return {Fact("device", "threads"): result.device.get("threads")}
    if result.experiment.target is None and result.compute is not None:
        return {Fact("device", "GPU"): result.compute.peak_source}
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


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
