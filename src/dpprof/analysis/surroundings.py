"""What a result was measured with and under: versions and settings that numbers depend on."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dpprof.analysis.machines import hardware_of
from dpprof.planning.code_digest import model_libraries
from dpprof.records.comparison import Across
from dpprof.records.result import Result
from dpprof.spec.registry import PREDICTIONS

_IN_PREDICTIONS = ("TORCH_CUDNN_SDPA_DEPRIORITIZED",)
"""The settings that predictions follow."""

_NO_SETTINGS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Settings whose effect is told otherwise: by the device and its number of threads."""


class Fact(NamedTuple):
    """Something that must be equal."""

    kind: Across
    name: str


def facts_of(result: Result) -> dict[Fact, Any]:
    """Return what of a result's device, versions and settings must be equal in another's.

    Nothing ran for a prediction, so of its machine only the threads count, for a CPU's workspaces.
    """
    predicted = result.instrument in PREDICTIONS
    device, provenance = result.device, result.provenance
    packages, settings = (_mapping(provenance.get(key)) for key in ("packages", "settings"))
    facts = {Fact("versions", name): packages.get(name) for name in _packages_of(result)}
    if predicted:
        facts |= _facts_of_prediction(result)
    else:
        facts[Fact("device", "device")] = hardware_of(result)
        if result.experiment.device == "cpu":
            facts[Fact("device", "threads")] = device.get("threads")
        else:
            facts[Fact("versions", "triton")] = packages.get("triton")
            facts[Fact("versions", "CUDA")] = provenance.get("cuda")
    for name, value in settings.items():
        if name in _IN_PREDICTIONS if predicted else name not in _NO_SETTINGS:
            facts[Fact("settings", name)] = value
    return facts


def _packages_of(result: Result) -> tuple[str, ...]:
    return ("torch", "opacus", "dpprof", *model_libraries(result.experiment))


def _facts_of_prediction(result: Result) -> dict[Fact, Any]:
    if result.experiment.device == "cpu":
        return {Fact("device", "threads"): result.device.get("threads")}
    if result.experiment.target is None and result.compute is not None:
        return {Fact("device", "GPU"): result.compute.peak_source}
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


class Usual:
    """The versions and settings of most measurements of a sweep, by the device asked for.

    Versions of torch, Opacus and what builds a model are not compared: results of others are
    measured again.
    """

    def __init__(self, results: Iterable[Result]) -> None:
        counts: dict[str, Counter[tuple[tuple[Fact, str], ...]]] = defaultdict(Counter)
        for result in results:
            if result.instrument not in PREDICTIONS and result.outcome == "ok":
                counts[result.experiment.device][tuple(_surroundings(result).items())] += 1
        self._usual = {name: dict(seen.most_common(1)[0][0]) for name, seen in counts.items()}

    def tell_unusual(self, result: Result) -> list[str]:
        """Return what a measurement has otherwise than most, each with both values."""
        if result.instrument in PREDICTIONS or result.experiment.device not in self._usual:
            return []
        own, usual = _surroundings(result), self._usual[result.experiment.device]
        return [
            f"{fact.name} {own.get(fact, 'none')} instead of {usual.get(fact, 'none')}"
            for fact in sorted({*own, *usual})
            if own.get(fact) != usual.get(fact)
        ]


def _surroundings(result: Result) -> dict[Fact, str]:
    facts = facts_of(result)
    packages = _packages_of(result)
    told = (fact for fact in facts if fact.kind != "device" and fact.name not in packages)
    return {fact: str(facts[fact]) for fact in sorted(told) if facts[fact] is not None}
