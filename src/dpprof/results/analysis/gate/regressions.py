"""What got worse from one folder of results to another: memory, FLOPs, bytes moved, time.

Figures without noise are compared as they are, step times by the statistics of the report. Runs are
matched by experiment and instrument; their replicates are pooled.
"""

import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpprof.experiments.records.comparison import (
    EXIT_STATUS,
    JUDGEMENTS,
    METRICS,
    Across,
    ComparedFigure,
    Explanation,
    FolderComparison,
    Metric,
    Run,
    Unlike,
    Verdict,
)
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.thresholds import Thresholds
from dpprof.results.analysis.conditions import Fact
from dpprof.results.analysis.gate.folders import (
    ResultsFolder,
    RunKey,
    explain_nothing_in_common,
    find_differences,
)
from dpprof.results.analysis.gate.judging import (
    ExactFigure,
    FamilyKey,
    Number,
    judge_exact,
    judge_outcomes,
    judge_step_times,
    leave_undecided,
    list_families,
)
from dpprof.results.analysis.groups import ExperimentRuns, Noise
from dpprof.system.messages import escape


class Options(NamedTuple):
    """What is compared, and how strictly."""

    metrics: Sequence[Metric] = METRICS
    across: Sequence[Across] = ()
    """What may differ between the sides."""

    thresholds: Thresholds = Thresholds()


class _Pair(NamedTuple):
    key: RunKey
    baseline: Sequence[Result]
    candidate: Sequence[Result]
    unlike: Mapping[Fact, tuple[str, str]]
    """What differs between the two sides, besides the code."""

    @property
    def sides(self) -> tuple[Sequence[Result], Sequence[Result]]:
        """Both, the baseline first."""
        return self.baseline, self.candidate

    @property
    def on_other(self) -> bool:
        """Whether they ran on different devices."""
        return any(fact.kind == "device" for fact in self.unlike)


def compare_folders(
    baseline: ResultsFolder, candidate: ResultsFolder, options: Options
) -> FolderComparison:
    """Compare two folders of results.

    A regression is one even where other runs are not comparable. Without one, what was run on both
    sides must be comparable, and something must have been judged.

    Args:
        baseline: What the candidate is compared with.
        candidate: What may be worse.
        options: What is compared, and how strictly.

    Example:
        >>> sides = [read_results_folder(Path(name)) for name in ("main", "branch")]
        >>> compare_folders(*sides, Options()).verdict
        'nothing worse'
    """
    pairs = [
        _Pair(key, results, candidate.runs[key], find_differences(results, candidate.runs[key]))
        for key, results in baseline.runs.items()
        if key in candidate.runs
    ]
    figures, unlike = _judge_pairs(pairs, options)
    differing = [figure for figure in figures if figure.judgement != "same"]
    judged = Counter(figure.metric for figure in figures if figure.judgement != "undecided")
    counts = Counter(figure.judgement for figure in figures)
    reason = None
    if not pairs:
        reason = explain_nothing_in_common(baseline, candidate)
    elif unlike:
        reason = "; ".join(map(_format_difference, unlike))
    elif not any(_would_count(figure) and figure.judgement != "undecided" for figure in figures):
        reason = f"no run has enough on both sides to judge {' or '.join(options.metrics)}"
    verdict: Verdict = "not comparable" if reason else "nothing worse"
    if counts["worse"]:
        verdict = "regression"
    return FolderComparison(
        verdict=verdict,
        exit_status=EXIT_STATUS[verdict],
        reason=reason,
        baseline=escape(str(baseline.path)),
        candidate=escape(str(candidate.path)),
        metrics=list(options.metrics),
        across=list(options.across),
        thresholds=options.thresholds,
        experiments=len({pair.key[0] for pair in pairs}),
        runs=len(pairs),
        counts={name: counts[name] for name in JUDGEMENTS},
        judged={name: judged[name] for name in options.metrics},
        figures=sorted(differing, key=_rank),
        not_comparable=unlike,
        only_in_baseline=[_run(key) for key in baseline.runs if key not in candidate.runs],
        only_in_candidate=[_run(key) for key in candidate.runs if key not in baseline.runs],
        explanations=list(_explain(baseline.path, candidate.path, pairs, differing)),
    )


def _judge_pairs(
    pairs: Sequence[_Pair], options: Options
) -> tuple[list[ComparedFigure], list[Unlike]]:
    """Return the figures of runs that are comparable, and why others are not."""
    noise = Noise([_group(side) for pair in pairs if not pair.on_other for side in pair.sides])
    figures: list[ComparedFigure] = []
    names: dict[tuple[Fact, tuple[str, str]], set[str]] = defaultdict(set)
    for pair in pairs:
        compared = list(_judge(pair, noise, options))
        barred = [fact for fact in pair.unlike if fact.kind not in options.across]
        if not barred:
            figures += compared
        elif any(map(_would_count, compared)):
            for fact in barred:
                names[fact, pair.unlike[fact]].add(pair.key[0])
    unlike = [
        Unlike(
            kind=fact.kind,
            name=fact.name,
            baseline=was,
            candidate=now,
            experiment_ids=sorted(experiments),
        )
        for (fact, (was, now)), experiments in names.items()
    ]
    return figures, unlike


def _format_difference(unlike: Unlike) -> str:
    """Return what differs, and the option that compares the runs in spite of it."""
    named = f"{unlike.name} {unlike.baseline} in the baseline and {unlike.candidate} in the"
    return f"{named} candidate (--across {unlike.kind} compares them all the same)"


def _explain(
    baseline: Path, candidate: Path, pairs: Sequence[_Pair], differing: Sequence[ComparedFigure]
) -> Iterator[Explanation]:
    """Say how to explain peaks that differ; A is the candidate."""
    explained = [figure for figure in differing if figure.figure in ("peak", "component")]
    differ = {(figure.experiment_id, figure.instrument) for figure in explained}
    for pair in pairs:
        name, instrument = pair.key
        numbers = [[r.replicate for r in s if r.memory and r.memory.at_peak] for s in pair.sides]
        if pair.key in differ and all(numbers):
            files = [
                str(root / instrument / f"{name}.r{replicates[0]}.json")
                for root, replicates in ((candidate, numbers[1]), (baseline, numbers[0]))
            ]
            command = shlex.join(["dpprof", "explain", *files])
            yield Explanation(experiment_id=name, instrument=instrument, command=escape(command))


def _group(results: Sequence[Result]) -> ExperimentRuns:
    return ExperimentRuns(results[0].experiment, len(results), results)


def _would_count(figure: ComparedFigure) -> bool:
    """Return whether there is anything to judge: that a run succeeds as before says nothing."""
    return figure.metric != "outcome" or figure.judgement != "same"


def _judge(pair: _Pair, noise: Noise, options: Options) -> Iterator[ComparedFigure]:
    yield judge_outcomes(pair.key, pair.baseline, pair.candidate)
    sides = [_values(results, options.metrics) for results in pair.sides]
    moved = _explain_moved_peak(pair)
    for family in dict.fromkeys([*sides[0], *sides[1]]):
        figures = [side.get(family) for side in sides]
        if figures[0] is None or figures[1] is None:
            if family.batch_size is None and all(sides):
                for figure, values in (figures[0] or figures[1] or {}).items():
                    yield leave_undecided(pair.key, figure, values, in_baseline=figures[1] is None)
            continue
        for figure in dict.fromkeys([*figures[0], *figures[1]]):
            was, now = figures[0].get(figure, [0]), figures[1].get(figure, [0])
            compared = judge_exact(pair.key, figure, was, now, options.thresholds)
            if moved and figure.name == "component" and compared.judgement != "same":
                compared = compared.model_copy(update={"reason": compared.reason or moved})
            yield compared
    if "time" in options.metrics:
        groups = _group(pair.baseline), _group(pair.candidate)
        if all(group.step_s for group in groups):
            reason = "times on different devices are not compared" if pair.on_other else None
            [comparison] = noise.compare_all([(groups[1], groups[0])])
            yield judge_step_times(pair.key, groups, comparison, options.thresholds.time, reason)


def _values(
    results: Sequence[Result], metrics: Collection[Metric]
) -> dict[FamilyKey, dict[ExactFigure, list[Number]]]:
    """Return the values of each figure over replicates, by family."""
    by_family: dict[FamilyKey, dict[ExactFigure, list[Number]]] = {}
    listed = [list_families(result, metrics) for result in results]
    for family in dict.fromkeys(family for families in listed for family in families):
        replicates = [families[family] for families in listed if family in families]
        figures = dict.fromkeys(figure for values in replicates for figure in values)
        by_family[family] = {f: [values.get(f, 0) for values in replicates] for f in figures}
    return by_family


def _explain_moved_peak(pair: _Pair) -> str | None:
    """Say that the peak is in another phase, where components are therefore others."""
    phases = [
        {r.memory.at_peak.phase for r in side if r.memory is not None and r.memory.at_peak}
        for side in pair.sides
    ]
    if not all(phases) or phases[0] == phases[1]:
        return None
    was, now = (" or ".join(sorted(names)).replace("_", " ") for names in phases)
    return f"the peak is in {now}, and was in {was}"


def _rank(figure: ComparedFigure) -> tuple[int, bool, bool, float, str]:
    """Rank by judgement; then failures, totals before parts, and the largest ratio."""
    ratio = figure.ratio
    away = float("inf") if not ratio else max(ratio, 1 / ratio)
    order, ran = JUDGEMENTS.index(figure.judgement), figure.metric != "outcome"
    return order, ran, figure.part is not None, -away, figure.experiment_id


def _run(key: RunKey) -> Run:
    return Run(experiment_id=key[0], instrument=key[1])
