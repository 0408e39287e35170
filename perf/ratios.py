"""Ratios of predicted times beside measured ones, for every pair of steps in one setting.

    export PYTHONPATH=src:tests
    python perf/ratios.py --predict   # traces every step, for about a quarter of an hour
    python perf/ratios.py --output perf/ratios.md

A pair is two rows of evidence.csv of the same GPU, model, size, dtype and optimizer that differ in
the method, the head or the execution; each has its own batch, and times are those of a sample.
Predicted are the ratio and its 90 % interval as ``dpprof advise`` judges methods by them
(``dpprof.results.analysis.advice.ratios``). What each step consists of is in ratios.jsonl.
Predictions are of the present code, our measurements of the code of their day.

One factor is calibrated with these pairs: how far off what only one of two steps runs may be, over
what is known of all kernels of its kind. It is the least of five at which 9 of 10 pairs are inside,
by what products rest on: measured products, the data sheet, or, of convolutions, a guess. To see
what that is worth, each GPU of ours and each source is also judged with the factor that the others
give alone. Of the other spreads, that of Python is from one step of these, on the H100, and that
between runs from repeated ones; the rest are those of predicted times.
"""

import itertools
import json
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.experiments.records.advice import StepParts, Stretch
from dpprof.results.analysis.advice.ratios import OWN, Ratio, compare
from dpprof.system.console import say
from evidence import Row, read_rows
from predictions import split_measured, split_private
from script import lay_out, make_parser, publish

STEPS = Path(__file__).with_name("ratios.jsonl")
_DIGITS = 5
_VARIES = ("method", "head", "execution")
"""What a pair differs in, at least one of."""

_FREE = {*_VARIES, "batch_size", "timed_steps", "warmup_steps", "memory_limit_bytes"}
"""Settings that rows of one setting need not share."""

FACTORS = (1.0, 1.5, 2.0, 2.5, 3.0)
_ENOUGH = 0.9


class Step(NamedTuple):
    """A measured time of a sample, and the parts of the predicted one."""

    row: Row
    parts: StepParts

    @property
    def is_ours(self) -> bool:
        """Whether it was measured for dpprof."""
        return self.row.page == "measured_steps"

    @property
    def sample_s(self) -> float:
        """Measured seconds of a sample."""
        row = self.row
        assert row.value is not None
        each = 1 / row.value if row.quantity == "throughput" else None
        return each or row.value / int(row.settings["batch_size"])

    @property
    def setting(self) -> tuple[str, ...]:
        """What steps must share to be compared."""
        row = self.row
        same = {name: value for name, value in row.settings.items() if name not in _FREE}
        return (
            row.group if not self.is_ours else "",
            row.target,
            row.model,
            row.quantity,
            str(same),
        )

    @property
    def varies(self) -> tuple[str, ...]:
        """The method, the head and the execution."""
        settings = {"method": self.row.method, "head": "logits", "execution": "eager"}
        settings |= self.row.settings
        return tuple(str(settings[name]) for name in _VARIES)


class Pair(NamedTuple):
    """Two steps of one setting, and the predicted ratio of their times."""

    first: Step
    second: Step
    ratio: Ratio

    @property
    def source(self) -> str:
        """Who measured them: a source, or we on a GPU."""
        row = self.first.row
        return f"own, {row.target.upper()}" if self.first.is_ours else row.source.name

    @property
    def measured(self) -> float:
        """The measured time of a sample of the first over that of the second."""
        return self.first.sample_s / self.second.sample_s

    @property
    def waits(self) -> bool:
        """Whether a step waits for its host for a twentieth of its time or more."""
        return _waits(self.first) or _waits(self.second)

    @property
    def error(self) -> float:
        """The predicted ratio over the measured one, less 1."""
        return (self.ratio.value or 0.0) / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measured ratio is in the predicted interval."""
        return self.ratio.times(1 / self.measured).holds_one

    def use(self, own: float) -> "Pair":
        """Return the pair with another spread of what only one of the steps runs."""
        first, second = (step.parts._replace(own=own) for step in self[:2])
        return self._replace(ratio=compare(first, second))


def _waits(step: Step) -> bool:
    each, update = step.parts.each, step.parts.update
    device_s = math.fsum((*each.kernels.values(), *update.kernels.values()))
    return step.parts.seconds > device_s / 0.95


def pair_up(steps: Iterable[Step]) -> list[Pair]:
    """Pair all steps of each setting that differ in more than the batch."""
    settings: dict[tuple[str, ...], list[Step]] = defaultdict(list)
    for step in steps:
        settings[step.setting].append(step)
    pairs = (
        Pair(*two, compare(two[0].parts, two[1].parts))
        for alike in settings.values()
        for two in itertools.combinations(alike, 2)
        if two[0].varies != two[1].varies
    )
    return sorted(pairs, key=lambda pair: (not pair.first.is_ours, pair.source))


def find_rows() -> Iterator[tuple[Row, Callable[[Row], StepParts]]]:
    """Yield the rows that have a predicted time, each with what predicts it."""
    for row in read_rows("measured_steps"):
        is_compiled = row.settings.get("execution") == "compiled"
        if row.quantity == "step time" and not row.not_predicted and not is_compiled:
            yield row, split_measured
    for row in read_rows("private_runs"):
        is_timed = row.quantity in ("step time", "throughput") and row.value is not None
        if is_timed and not row.not_predicted:
            yield row, split_private


def write_steps(path: Path = STEPS) -> None:
    """Predict every row, and write what its step consists of."""
    lines = []
    for row, split in find_rows():
        parts = split(row)
        say(row.id)
        stretches = {name: _write_stretch(getattr(parts, name)) for name in ("each", "update")}
        fields = parts._asdict() | stretches | {"device": f"{row.target}, {row.source.dtype}"}
        lines.append(json.dumps({"id": row.id, **fields}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_stretch(stretch: Stretch) -> dict[str, Any]:
    kernels = {" ".join(cell): _round(seconds) for cell, seconds in stretch.kernels.items()}
    others = {name: _round(getattr(stretch, name)) for name in ("seconds", "host", "exchange")}
    return {**others, "kernels": kernels}


def _round(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def read_steps(path: Path = STEPS) -> list[Step]:
    """Read what the predicted step of each row consists of."""
    rows = {row.id: row for row, _ in find_rows()}
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        row = rows[fields.pop("id")]
        stretches = {name: _read_stretch(fields[name]) for name in ("each", "update")}
        steps.append(Step(row, StepParts(**fields | stretches)))
    return steps


def _read_stretch(fields: Mapping[str, Any]) -> Stretch:
    cells = {tuple(cell.split()): seconds for cell, seconds in fields["kernels"].items()}
    return Stretch(**{**fields, "kernels": cells})


class Judged(NamedTuple):
    """Pairs of one source, judged with what those of others give."""

    name: str
    factor: float
    inside: int
    pairs: int


def judge_by_others(pairs: Sequence[Pair]) -> list[Judged]:
    """Judge each source with the least factor at which enough pairs of the others are inside.

    Where there are no others, that is the least factor.
    """
    judged = []
    for basis, own in OWN.items():
        alike = [pair for pair in pairs if pair.first.parts.own == own]
        inside = {factor: [pair.use(factor).is_inside for pair in alike] for factor in FACTORS}
        for source in dict.fromkeys(pair.source for pair in alike):
            is_of = [pair.source == source for pair in alike]
            others = len(alike) - sum(is_of)
            enough = (
                factor
                for factor, held in inside.items()
                if sum(map(operator.gt, held, is_of)) >= _ENOUGH * others
            )
            factor = next(enough, FACTORS[-1])
            count = sum(map(operator.and_, inside[factor], is_of))
            judged.append(Judged(f"{source}, {basis}", factor, count, sum(is_of)))
    return judged


def summarise(pairs: Sequence[Pair]) -> list[str]:
    """Lay out how near predicted ratios are, and how many intervals hold the measured ones."""
    ours = [pair for pair in pairs if pair.first.is_ours]
    others = [pair for pair in pairs if not pair.first.is_ours]
    complete = [pair for pair in others if pair.first.row.source.complete]
    groups = {
        "own": ours,
        "own, no step waits for its host": [pair for pair in ours if not pair.waits],
        "own, a step waits for its host": [pair for pair in ours if pair.waits],
        "published": others,
        "published, all stated that a prediction needs": complete,
        "published, the same batch": [
            pair for pair in others if len({s.row.settings["batch_size"] for s in pair[:2]}) == 1
        ],
    }
    for pair in others:
        groups.setdefault(pair.source, []).append(pair)
    rows = []
    for name, group in groups.items():
        errors = [abs(pair.error) for pair in group]
        inside = sum(pair.is_inside for pair in group)
        cells = f"{statistics.median(errors):.1%}", f"{inside} ({inside / len(group):.0%})"
        rows.append((name, len(group), *cells))
    return lay_out(("pairs", "number:", "median absolute error:", "inside:"), rows)


def tabulate(pairs: Sequence[Pair]) -> str:
    """Lay out the summary, what each source is worth to others, and every pair."""
    judged = judge_by_others(pairs)
    rows = [(one.name, one.factor, f"{one.inside} of {one.pairs}") for one in judged]
    inside, of = (sum(getattr(one, name) for one in judged) for name in ("inside", "pairs"))
    lines = [
        *summarise(pairs),
        *("", "Each source judged with the factor of the others:", ""),
        *lay_out(("source", "factor:", "inside:"), rows),
        *("", f"Together {inside} of {of} ({inside / of:.0%}).", ""),
        "An asterisk marks an interval that the measured ratio lies outside of.",
    ]
    heads = ("setting", "first", "over", "measured:", "predicted:", "90 % interval:", "error:")
    for source, group in itertools.groupby(pairs, key=lambda pair: pair.source):
        lines += ["", f"## {source}", "", *lay_out(heads, map(_lay_out_pair, group))]
    return "\n".join(lines)


def _lay_out_pair(pair: Pair) -> list[str]:
    row, ratio = pair.first.row, pair.ratio
    settings = row.settings
    size = settings.get("size", settings.get("seq_len"))
    told = [row.model, str(size), str(settings.get("dtype", row.source.dtype))]
    told += ["LoRA"] if settings.get("lora") else []
    told += [str(settings["quantization"])] if settings.get("quantization") else []
    mark = "" if pair.is_inside else " *"
    return [
        *(", ".join(told), *map(_name, pair[:2]), f"{pair.measured:.3f}", f"{ratio.value:.3f}"),
        *(f"{ratio.low:.2f} to {ratio.high:.2f}{mark}", f"{pair.error:+.1%}"),
    ]


def _name(step: Step) -> str:
    usual = ("logits", "eager")
    method, *others = step.varies
    words = [word for word in others if word not in usual]
    return ", ".join([method, *words, f"B {step.row.settings['batch_size']:,}"])


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--predict", action="store_true", help="predict every row anew")
    arguments = parser.parse_args()
    if arguments.predict:
        write_steps()
    publish(__doc__, tabulate(pair_up(read_steps())), arguments.output)


if __name__ == "__main__":
    main()
