"""What got worse from one folder of results to another: memory, FLOPs, bytes moved, time.

Figures without noise are compared as they are, step times by the statistics of the report. Runs are
matched by experiment and instrument; their replicates are pooled. Their machines, versions and
settings must be equal.
"""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.validation import InputError, limit_lines
from dpprof.experiments.planning.artifacts import RESULTS, RUN
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
    Thresholds,
    Unlike,
    Verdict,
)
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import Result, read_result
from dpprof.results.analysis.collection import drop_details
from dpprof.results.analysis.conditions import Fact, facts_of
from dpprof.results.analysis.gate import judging
from dpprof.results.analysis.gate.judging import ExactFigure, FamilyKey, Number, RunKey
from dpprof.results.analysis.groups import ExperimentRuns, Noise
from dpprof.system.messages import escape

_NAME = re.compile(r".+\.r[0-9]+\.json")


class ResultsFolder(NamedTuple):
    """A folder of results."""

    path: Path  # the folder that holds those of the instruments
    runs: dict[RunKey, list[Result]]  # replicates in order, without large parts


def read_results_folder(folder: Path) -> ResultsFolder:
    """Read ``<instrument>/<id>.r<N>.json`` in a folder, or in its folder ``results``.

    Raises:
        InputError: It is no folder or holds no results, or results cannot be trusted or lie where
            those of another run belong; the message names the files.
        OSError: A file cannot be read.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: is not a folder; name one that holds results")
    pattern = f"{RUN.pattern}.json"
    for root in (folder, folder / RESULTS):
        if files := sorted(file for file in root.glob(pattern) if _NAME.fullmatch(file.name)):
            return ResultsFolder(root, _read_all(files))
    raise InputError(f"{folder}: holds no results, which are INSTRUMENT/ID.rN.json")


def _read_all(files: list[Path]) -> dict[RunKey, list[Result]]:
    runs: dict[RunKey, list[Result]] = defaultdict(list)
    problems: list[str] = []
    for file in files:
        try:
            result = read_result(file)
        except ResultError as error:  # its own message says to delete the file
            problems.append(f"{file}: {error.problem}")
            continue
        named = f"{result.experiment_id}.r{result.replicate}"
        if (result.instrument, named) != (file.parent.name, file.stem):
            problems.append(f"{file}: holds another run, {named} of {result.instrument}")
            continue
        runs[RunKey(result.experiment_id, result.instrument)].append(drop_details(result))
    if problems:
        raise InputError("\n".join(limit_lines(problems)))
    return {key: sorted(results, key=lambda r: r.replicate) for key, results in runs.items()}


_MOST_PAIRS = 20_000  # how many pairs of experiments are looked at for the two that are most alike
_MOST_NAMED = 3  # how many differences of two experiments are named


def _find_differences(
    results: tuple[Sequence[Result], Sequence[Result]],
) -> dict[Fact, tuple[str, str]]:
    """Return what differs between two sides of one run, with both sides' values.

    Replicates of one side that differ count too.
    """
    sides: tuple[dict[Fact, set[str]], dict[Fact, set[str]]] = {}, {}
    for values, side in zip(sides, results, strict=True):
        for fact, value in (item for result in side for item in facts_of(result).items()):
            values.setdefault(fact, set()).add("none" if value is None else str(value))
    differences = {}
    for fact in dict.fromkeys([*sides[0], *sides[1]]):
        was, now = (side.get(fact, {"none"}) for side in sides)
        if was != now or len(was) > 1:
            differences[fact] = " or ".join(sorted(was)), " or ".join(sorted(now))
    return differences


def _explain_nothing_in_common(baseline: ResultsFolder, candidate: ResultsFolder) -> str:
    if {name for name, _ in baseline.runs} & {name for name, _ in candidate.runs}:
        return "no experiment was run on both sides under the same instrument"
    sides = [
        {name: results[0].experiment for (name, _), results in side.runs.items()}.values()
        for side in (baseline, candidate)
    ]
    differences = [
        (a, b, [key for key in Experiment.model_fields if getattr(a, key) != getattr(b, key)])
        for a, b in islice(product(*sides), _MOST_PAIRS)
    ]
    a, b, keys = min(differences, key=lambda pair: len(pair[2]))
    if len(keys) > _MOST_NAMED:
        return "no experiment is in both folders"
    differing = [
        f"{key} {str(getattr(a, key))[:80]} and {str(getattr(b, key))[:80]}" for key in keys
    ]
    return f"no experiment is in both folders; the most similar differ in {', '.join(differing)}"


class Options(NamedTuple):
    """What is compared, and how strictly."""

    metrics: Sequence[Metric] = METRICS
    across: Sequence[Across] = ()  # what may differ between the sides
    thresholds: Thresholds = Thresholds()


class _Pair(NamedTuple):
    key: RunKey
    sides: tuple[Sequence[Result], Sequence[Result]]  # the baseline first
    unlike: Mapping[Fact, tuple[str, str]]  # what differs between the two sides, besides the code

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

    Example:
        >>> sides = [read_results_folder(Path(name)) for name in ("main", "branch")]
        >>> compare_folders(*sides, Options()).verdict
        'nothing worse'
    """
    shared = [key for key in baseline.runs if key in candidate.runs]
    both = {key: (baseline.runs[key], candidate.runs[key]) for key in shared}
    pairs = [_Pair(key, sides, _find_differences(sides)) for key, sides in both.items()]
    figures, unlike = _judge_pairs(pairs, options)
    differing = [figure for figure in figures if figure.judgement != "same"]
    judged = Counter(figure.metric for figure in figures if figure.judgement != "undecided")
    counts = Counter(figure.judgement for figure in figures)
    reason = None
    if not pairs:
        reason = _explain_nothing_in_common(baseline, candidate)
    elif unlike:
        reason = "; ".join(
            f"{it.name} {it.baseline} in the baseline and {it.candidate} in the candidate "
            f"(--across {it.kind} compares them all the same)"
            for it in unlike
        )
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
        experiments=len({pair.key.experiment_id for pair in pairs}),
        runs=len(pairs),
        counts={name: counts[name] for name in JUDGEMENTS},
        judged={name: judged[name] for name in options.metrics},
        figures=sorted(differing, key=_rank),
        not_comparable=unlike,
        only_in_baseline=[Run(**k._asdict()) for k in baseline.runs if k not in both],
        only_in_candidate=[Run(**k._asdict()) for k in candidate.runs if k not in both],
        explanations=list(_explain(baseline.path, candidate.path, pairs, differing)),
    )


def _judge_pairs(
    pairs: Sequence[_Pair], options: Options
) -> tuple[list[ComparedFigure], list[Unlike]]:
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
                names[fact, pair.unlike[fact]].add(pair.key.experiment_id)
    return figures, [
        Unlike(**fact._asdict(), baseline=was, candidate=now, experiment_ids=sorted(experiments))
        for (fact, (was, now)), experiments in names.items()
    ]


def _explain(
    baseline: Path, candidate: Path, pairs: Sequence[_Pair], differing: Sequence[ComparedFigure]
) -> Iterator[Explanation]:
    """Say how to explain peaks that differ; A is the candidate."""
    explained = [figure for figure in differing if figure.figure in ("peak", "component")]
    differ = {RunKey(figure.experiment_id, figure.instrument) for figure in explained}
    for pair in pairs:
        numbers = [[r.replicate for r in s if r.memory and r.memory.at_peak] for s in pair.sides]
        if pair.key in differ and all(numbers):
            name, instrument = pair.key
            files = [
                str(root / instrument / f"{name}.r{replicates[0]}.json")
                for root, replicates in ((candidate, numbers[1]), (baseline, numbers[0]))
            ]
            command = escape(shlex.join(["dpprof", "explain", *files]))
            yield Explanation(**pair.key._asdict(), command=command)


def _group(results: Sequence[Result]) -> ExperimentRuns:
    return ExperimentRuns(results[0].experiment, len(results), results)


def _would_count(figure: ComparedFigure) -> bool:
    """Return whether there is anything to judge: that a run succeeds as before says nothing."""
    return figure.metric != "outcome" or figure.judgement != "same"


def _judge(pair: _Pair, noise: Noise, options: Options) -> Iterator[ComparedFigure]:
    yield judging.judge_outcomes(pair.key, *pair.sides)
    sides = [_values(results, options.metrics) for results in pair.sides]
    moved = _explain_moved_peak(pair)
    for family in dict.fromkeys([*sides[0], *sides[1]]):
        figures = [side.get(family) for side in sides]
        if None in figures and (family.batch_size is not None or not all(sides)):
            continue
        for figure in dict.fromkeys(figure for side in figures for figure in side or ()):
            was, now = (None if side is None else side.get(figure, [0]) for side in figures)
            compared = judging.judge_exact(pair.key, figure, was, now, options.thresholds)
            if moved and figure.figure == "component" and compared.judgement != "same":
                compared = compared.model_copy(update={"reason": compared.reason or moved})
            yield compared
    if "time" in options.metrics:
        before, after = map(_group, pair.sides)
        if before.step_s and after.step_s:
            reason = "times on different devices are not compared" if pair.on_other else None
            comparison = noise.compare(after, before)
            threshold = options.thresholds.time
            yield judging.judge_step_times(pair.key, (before, after), comparison, threshold, reason)


def _values(
    results: Sequence[Result], metrics: Collection[Metric]
) -> dict[FamilyKey, dict[ExactFigure, list[Number]]]:
    by_family: dict[FamilyKey, dict[ExactFigure, list[Number]]] = {}
    listed = [judging.list_families(result, metrics) for result in results]
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
