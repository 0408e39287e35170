"""Say which private method to use on a GPU that need not be here, and what that rests on."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpprof.analysis.advice.advice import Advice, Option, advise
from dpprof.analysis.standings import DAGGER, DOUBLE_DAGGER, Marks, read_standings, sign
from dpprof.analysis.tables.axes import target_text
from dpprof.cli.capacities import answer, make_parser, say_smallest_batch, tell_smallest
from dpprof.cli.common import lay_out
from dpprof.planning.code_digest import verdict_digest
from dpprof.records.result import Result
from dpprof.records.verdict import Standing
from dpprof.spec.experiment import Experiment
from dpprof.spec.mechanisms import is_other_mechanism


def _number(value: float | None, form: str, otherwise: str = "unknown") -> str:
    return otherwise if value is None else format(value, form)


def _recommend(advice: Advice) -> list[str]:
    """Say which method to use, in a sentence or two."""
    best = advice.best
    trained = "" if advice.lora is None else f" with LoRA ({advice.lora})"
    ranks = "" if advice.parallel is None else f", {advice.parallel}"
    where = f"{advice.model}{trained}, {advice.seq_len:,} tokens, {advice.dtype}{ranks}"
    where += f", on {advice.target}"
    if any(option.verdict == "unranked" for option in advice.options):
        return [f"No time is predicted, so methods that fit are not ranked: {where}."]
    if best is None:
        wrong = any(option.verdict == "wrong" for option in advice.options)
        return [f"No private method {'can be advised' if wrong else 'safely fits'}: {where}."]
    said = [f"Use {best.method} with batches of {best.safe_batch_size}: {where}."]
    close = [option.method for option in advice.options if option.verdict == "close"]
    if close:
        said.append(f"No difference predicted between it and: {', '.join(close)}.")
    return said


_COLUMNS = ("verdict", "safe batch", "tokens/s", "90 % interval", "FLOPs x")


def _interval(option: Option) -> str:
    if option.tokens_per_s_low is None or option.tokens_per_s_high is None:
        return "unknown"
    return f"{option.tokens_per_s_low:,.0f} to {option.tokens_per_s_high:,.0f}"


def _cells(option: Option) -> tuple[str, ...]:
    fits = option.largest_batch_size is not None
    return (
        option.verdict,
        _number(option.safe_batch_size, ",", "none" if fits else ""),
        _number(option.tokens_per_s, ",.0f", "unknown" if fits else ""),
        _interval(option) if fits else "",
        _number(option.dp_flop_multiplier, ".2f", "unknown" if fits else ""),
    )


def _lay_out(advice: Advice, names: Mapping[str, str]) -> list[str]:
    """Lay out the methods, with adapters and without side by side."""
    sides = [advice, *([] if advice.whole is None else [advice.whole])]
    found = [{option.method: _cells(option) for option in side.options} for side in sides]
    rows = [
        [names[one.method], *(c for side in found for c in side[one.method])]
        for one in advice.options
    ]
    header = ["method", *_COLUMNS * len(sides)]
    lines = lay_out([header, *rows], texts=(0, *range(1, len(header), len(_COLUMNS))))
    if len(sides) > 1:
        lora_at = lines[0].index(_COLUMNS[0])
        whole_at = lines[0].index(_COLUMNS[0], lora_at + 1)
        lines.insert(0, f"{' ' * lora_at}LoRA".ljust(whole_at) + "whole")
    return lines


def _explain(advice: Advice) -> list[str]:
    """Say why options do not work or need care, once for each reason."""
    methods: dict[str, list[str]] = {}
    for trained, side in (("", advice), (" (whole)", advice.whole)):
        for option in () if side is None else side.options:
            reasons = option.message, say_smallest_batch(option.smallest_batch_size)
            for reason in filter(None, reasons):
                methods.setdefault(reason, []).append(option.method + trained)
    return [f"{', '.join(named)}: {message}" for message, named in methods.items()]


def tell(advice: Advice) -> str:
    """Say the advice, for people."""
    sides = [advice, *([] if advice.whole is None else [advice.whole])]
    options = [option for side in sides for option in side.options]
    marks: Marks = {
        DAGGER: [option.method for option in options if not option.verified],
        DOUBLE_DAGGER: [
            option.method for option in options if is_other_mechanism(option.mechanism)
        ],
    }
    names = {option.method: option.method + sign(option.method, marks) for option in options}
    said = [sentence for side in sides for sentence in _recommend(side)]
    said += [*_lay_out(advice, names), *_explain(advice)]
    if marks[DAGGER]:
        said.append(
            f"{DAGGER} Not verified here to compute the right gradient; "
            "dpprof verify --output results/verify/<model>-<method>.json does."
        )
    if marks[DOUBLE_DAGGER]:
        said.append(f"{DOUBLE_DAGGER} Another mechanism than flat clipping; docs/methods.md.")
    said += [f"Memory: {advice.sure_of_memory}.", f"Time: {advice.sure_of_time}."]
    return "\n".join(said)


def judge(experiments: Sequence[Experiment], results: Sequence[Result]) -> tuple[str, str, bool]:
    """Return the methods in order, as far as their verdicts are known here."""
    standings = read_standings(Path(), experiments, verdict_digest)
    by_ranks: dict[int, list[Result]] = defaultdict(list)
    for result in results:
        by_ranks[result.experiment.world_size].append(result)
    found = [_advise(experiments[0], alike, standings) for alike in by_ranks.values()]
    fits = any(option.safe_batch_size for advice in found for option in advice.options)
    told = [*map(tell, found), *tell_smallest(results)]
    dumped = [advice.model_dump(mode="json") for advice in found]
    return json.dumps(dumped[0] if len(found) == 1 else dumped, indent=1), "\n".join(told), fits


def _advise(
    asked_first: Experiment, results: Sequence[Result], standings: Mapping[str, Standing]
) -> Advice:
    """Rank the methods on one number of ranks, with adapters and without."""
    target = target_text(asked_first) or "this machine"
    asked = [one for one in results if one.experiment.lora == asked_first.lora]
    whole = [one for one in results if one.experiment.lora != asked_first.lora]
    advice = advise(asked, target, standings)
    if whole:
        advice = advice.model_copy(update={"whole": advise(whole, target, standings)})
    return advice


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    answer(make_parser("advise", __doc__).parse_args(argv), judge, whole_too=True)
