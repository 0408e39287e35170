"""Runs grouped into experiments, experiments into settings, and the noise of each."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.step_costs import Exchange
from dpprof.results.analysis.collection import Collected
from dpprof.results.analysis.conditions import find_usual, machine_of
from dpprof.results.analysis.statistics import Comparison, compare, noise_floor
from dpprof.results.analysis.tables.axes import NOT_IN_BASELINE, model_text
from dpprof.system.files import canonical_json

RECORDERS = ("memory", "estimate")
"""The instruments that record the experiment's own memory timeline, the preferred one first."""


class PeakMemory(NamedTuple):
    """The peak memory of an experiment, one value per process."""

    kind: str | None
    sizes: Sequence[int]


@dataclass(frozen=True)
class ExperimentRuns:
    """An experiment and what its processes measured."""

    experiment: Experiment
    planned: int
    results: Sequence[Result]
    machine: str | None = None  # the one whose times and peaks count; None for any

    @cached_property
    def step_s(self) -> list[float]:
        """Median step time of each clean process; step times come from no other instrument."""
        times = [r.time.median_s for r in self._ok("clean") if r.time]
        return [seconds for seconds in times if seconds is not None]

    @cached_property
    def timed_on(self) -> Mapping[str, Any] | None:
        """The device of the clean processes, as their results describe it; None if none succeeded.

        Other results may name another device: predictions always run on the CPU.
        """
        return next((r.device for r in self._ok("clean") if r.time), None)

    @cached_property
    def peaks(self) -> PeakMemory:
        """Allocator peaks, from ``clean`` or else ``phases``; without them resident memory."""
        sources = (
            ("allocated", "clean", "peak_allocated_bytes"),
            ("allocated", "phases", "peak_allocated_bytes"),
            ("rss", "clean", "peak_rss_bytes"),
        )
        for kind, instrument, figure in sources:
            if values := self.peaks_of(instrument, figure):
                return PeakMemory(kind, values)
        return PeakMemory(None, [])

    @cached_property
    def sent_bytes(self) -> int | None:
        """The bytes that one of several ranks sends in a step; None if no step recorded them."""
        results = [r for name in RECORDERS for r in self._ok(name)]
        sent = (sent_bytes(r.communication) for r in results)
        return next((size for size in sent if size is not None), None)

    @cached_property
    def setting(self) -> str:
        """The key that the experiment shares with its baseline and with competing methods."""
        return setting_key(self.experiment)

    def peaks_of(self, instrument: str, figure: str) -> list[int]:
        """Return the known values of one figure of ``memory``, of one instrument's processes."""
        sizes = (getattr(r.memory, figure) for r in self._ok(instrument) if r.memory)
        return [size for size in sizes if size is not None]

    def _ok(self, instrument: str) -> list[Result]:
        ok = (r for r in self.results if r.instrument == instrument and r.outcome == "ok")
        return [r for r in ok if self.machine is None or machine_of(r) in {None, self.machine}]


class Noise:
    """How much processes of the same experiment differ, for each group of similar experiments."""

    def __init__(self, groups: Sequence[ExperimentRuns]) -> None:
        self._step_s: dict[str, list[Sequence[float]]] = defaultdict(list)
        self._floor = cache(lambda key, counts: noise_floor(self._step_s[key], counts))
        for group in groups:
            for key in self._keys(group):
                self._step_s[key].append(group.step_s)

    def compare(self, group: ExperimentRuns, base: ExperimentRuns) -> Comparison:
        """Compare step times by the noise floor of the most similar replicated experiments."""
        counts = (len(group.step_s), len(base.step_s))
        floors = (self._floor(key, counts) for key in self._keys(group))
        floor = next((floor for floor in floors if floor is not None), None)
        return compare(group.step_s, base.step_s, floor)

    @staticmethod
    def _keys(group: ExperimentRuns) -> tuple[str, str]:
        """Return two keys: for the same baseline, and for the same model on the same device."""
        return group.setting, f"{model_text(group.experiment)} on {group.experiment.device}"


def sent_bytes(communication: Sequence[Exchange] | None) -> int | None:
    """Return the bytes that a rank sends in a step, and also receives; None if not known."""
    if communication is None:
        return None
    return sum(exchange.bytes_each_way for exchange in communication)


def group_runs(collected: Collected) -> list[ExperimentRuns]:
    """Group the runs of a config by experiment.

    Times and peaks of other machines than that of most results do not count, so that nothing is
    compared across machines; they are findings.
    """
    planned = Counter(run.id for run in (*(run for run, _ in collected.runs), *collected.missing))
    results: dict[str, list[Result]] = defaultdict(list)
    for run, result in collected.runs:
        results[run.id].append(result)
    usual = find_usual((result for _, result in collected.runs), machine_of)
    return [
        ExperimentRuns(
            alike[0].experiment, planned[name], alike, usual.get(alike[0].experiment.device)
        )
        for name, alike in results.items()
    ]


def setting_key(experiment: Experiment) -> str:
    """Return the key that an experiment shares with its baseline and with competing methods."""
    return canonical_json(experiment.model_dump(mode="json", exclude=NOT_IN_BASELINE))
